"""Queries over run stores, for `engine show` and `engine view`: lists, filters, comparisons, curves of a training."""
