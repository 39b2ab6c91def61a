"""One request's reads: plan, load, sessions, what is read ahead and what climbs afterwards."""
