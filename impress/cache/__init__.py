"""Copies of chunks and probe records in fast memory, under their budgets."""
