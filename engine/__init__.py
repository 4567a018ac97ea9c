"""Declared multi-turn episodes for reinforcement learning, exact to the token."""

import sys

from engine.moved_names import MovedModules

__version__ = "0.1.0"

sys.meta_path.append(MovedModules())
