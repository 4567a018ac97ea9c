"""Confinement of programs: of those that a model wrote, of agent programs, and of worker processes.

sandbox.py       tools that run programs of the model, in bubblewrap
system_calls.py  the filter of system calls of programs in bubblewrap
confine.py       limits, uids and capabilities of one process

Invariant: a program never runs with less protection than was asked for; where that cannot be had here, it is refused.
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="confinement",
    about="Confinement of programs: tools that run a model's programs in a sandbox, limits and users of processes",
)
