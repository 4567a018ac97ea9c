"""Calls of a spec's code: with a deadline, and never on the main loop."""
