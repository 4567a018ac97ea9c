"""`isolation: process`: environments, tools, users and functions of a spec in worker processes with limits.

    zygote.py      the process that forks workers: small, single-threaded, without torch
    child.py       code of a worker: import, build, call, answer
    workers.py     the engine's side of both: the zygote, a call of a worker, its deadline, the end of the process
    remote.py      objects and functions that live in workers, and the pools of these
    host.py        the host of the mode
    rules.py       its rule of `engine validate`

Invariants:
- The engine never runs code that a worker sends: answers are JSON, validated against the expected contract.
- A worker serves one call at a time, so the end of a worker is blamed on exactly one call.
- A worker is killed at the deadline of its call, with every process that it started.
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="isolation",
    about="Code of a spec in worker processes with limits",
    needs=("confinement",),
    isolation_modes={"process": "engine.plugins.isolation.host:Isolation"},
    rules=("engine.plugins.isolation.rules",),
)
