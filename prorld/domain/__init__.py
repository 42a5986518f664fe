"""Pure nouns and decisions of the rollout service: no I/O, no clock, no trio. Time and seeds are arguments."""
