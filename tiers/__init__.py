"""Bytes on media: slots, segments, alignment, threads, checksums. Knows nothing of meaning."""
