"""Environments of other libraries, run unchanged: one file for each library.

Which there are and what holds for each is in `engine.schemas.adapters`. A file here imports its library when an episode
begins, so the engine runs without it.
"""
