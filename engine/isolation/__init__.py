"""Worker processes with limits, for environments, tools, users and scorers.

    server.py      the engine's side of the process that forks workers
    zygote.py      that process: small, single-threaded, without torch
    confine.py     limits, uids and capabilities of one worker
    child.py       code of a worker: import, build, call, answer
    worker.py      the engine's side of one worker: a call, its deadline, the end of the process
    remote.py      objects and functions that live in workers
    pool.py        assigns workers to objects and calls
    sandbox.py     tools that run the model's programs in bubblewrap
    system_calls.py the filter of system calls of programs in bubblewrap

Invariants:
- The engine never runs code that a worker sends: answers are JSON, validated against the expected contract.
- A worker serves one call at a time, so the end of a worker is blamed on exactly one call.
- A worker is killed at the deadline of its call, with every process that it started.
"""
