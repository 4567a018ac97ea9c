"""Learning: from rows to better weights."""
