"""A store as a whole, looked at or mended: verify, rebuild, doctor, its present state."""
