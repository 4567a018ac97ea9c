"""Fixtures of tests of data sets."""

from vision_specs import vlm

__all__ = ["vlm"]
