"""Parts of earlier systems, working beside impress: to choose, or to compare with.

docs/LINEAGE.md says what each did, what is kept of it, and what it measures at.
"""
