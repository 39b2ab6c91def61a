"""From a prompt's K and V to home: admission, draft, writer, the committer, the index on disk."""
