"""Measurements: `python -m experiments.NAME`. Never imported by the packages."""
