"""Drives many episodes: concurrency, groups, resume, counts."""
