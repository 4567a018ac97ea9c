"""What commands print while they work and at their end: panels, lists, episodes, ledgers."""
