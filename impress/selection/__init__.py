"""Which rows of a layer a request needs: probe codecs, scores, identifiers. Pure; no I/O."""
