"""Environments and tools of other libraries, run unchanged: one file for each library, imported when an episode begins.

verl/   interactions and tools of verl, and the conversion of its configurations
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="adapters",
    about="Environments and tools of other libraries: slime, SKyRL-gym, Gymnasium, verifiers, reasoning-gym, verl and MCP",
)
