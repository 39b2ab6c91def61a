"""A store as a whole, looked at or mended: verify, rebuild, doctor, how it stands."""
