"""Agent programs of the example specs. They use the standard library alone and know nothing of the engine but its variables."""
