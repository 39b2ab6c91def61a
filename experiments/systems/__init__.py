"""The paper's system, its baselines and its rivals, served by the same code on the same clock."""
