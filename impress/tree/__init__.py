"""Metadata in memory: the radix tree, the catalog, leases, who leaves first."""
