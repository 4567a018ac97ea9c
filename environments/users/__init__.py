"""Simulated users that ship with the engine. See docs/environments.md."""
