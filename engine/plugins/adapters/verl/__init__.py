"""Interactions and tools of verl, run unchanged, and the conversion of its configurations to specs."""
