"""Worlds that ship with the engine: one file an environment, tool or simulated user."""
