"""Queries over run stores, for `engine show`, `engine view` and `engine compare`: lists, filters, comparisons, curves
of a training."""
