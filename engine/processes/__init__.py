"""Child processes: a worker that does jobs, a fork that answers requests, and what every child needs of the system.

    worker.py      `Worker`, `WorkerPool`: an interpreter with the engine's import path that calls one function
    forked.py      `Child`: a fork of this process, with a deadline and a memory limit for each answer
    system.py      standard streams, limits, death with the parent, descriptors with messages

Invariant: a child ends with its parent, and a child that has no answer in time is killed.
"""
