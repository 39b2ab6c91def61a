"""Rows read together moved together, in the background."""
