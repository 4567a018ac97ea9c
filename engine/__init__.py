"""Declared multi-turn episodes for reinforcement learning, exact to the token."""

__version__ = "0.1.0"
