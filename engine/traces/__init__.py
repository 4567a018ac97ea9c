"""Traces of ended episodes."""
