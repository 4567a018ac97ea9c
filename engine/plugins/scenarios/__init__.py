"""Scenario tests: scripted episodes of a spec, run without a model and compared with their expected results."""
