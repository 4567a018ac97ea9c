"""Condensing: how messages are cut into chunks, and what is put in their place. Pure functions; the action does the I/O."""
