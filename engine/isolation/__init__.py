"""Worker processes with limits, for environments, tools, users and scorers.

    server.py      the engine's side of the process that forks workers
    zygote.py      that process: small, single-threaded, without torch
    confine.py     limits, uids and capabilities of one worker
    child.py       what a worker does: import, build, call, answer
    worker.py      the engine's side of one worker: a call, its deadline, its death
    remote.py      objects and functions that live in workers
    pool.py        who gets which worker
    sandbox.py     tools that run programs of the model in bubblewrap

Invariants:
- The engine never runs code that a worker sends: answers are JSON, and are validated as the contracts that they claim to be.
- A worker serves one call at a time, so a dead worker is blamed on exactly one call.
- A worker dies at the deadline of its call, with every process that it started.
"""
