"""Agent programs of the example specs. They need the standard library alone, and know only the engine's variables."""
