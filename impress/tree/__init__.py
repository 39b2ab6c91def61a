"""Metadata in memory: the radix tree, the catalog, leases, what leaves first."""
