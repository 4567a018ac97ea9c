"""Servers that a run starts itself: commands, processes, health, logs, restarts."""
