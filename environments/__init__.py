"""Environments, tools and simulated users that ship with the engine, one per file."""
