"""Scenario tests: a spec's episodes, scripted, played without a model, and held to what must come of them."""
