"""The contracts: Pydantic models, no I/O, no torch, nothing of the engine."""
