"""What requests have shown: rows chosen, chunks used, windows seen before."""
