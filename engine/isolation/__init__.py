"""Confinement of programs, for tools and agent programs that run what a model wrote.

    sandbox.py      tools that run the model's programs in bubblewrap
    system_calls.py the filter of system calls of programs in bubblewrap
    confine.py      limits, uids and capabilities of one process

Invariant: a program never runs with less protection than was asked for; where that cannot be had here, it is refused.
"""
