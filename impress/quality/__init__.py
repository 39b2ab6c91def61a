"""Whether choosing rows is good enough here: the guard, and its ledgers."""
