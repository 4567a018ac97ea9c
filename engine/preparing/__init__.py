"""Preparing data: results of pure functions over many rows, made in several processes and kept on disk.

    cache.py      results on disk, under the digest of everything that they depend on
    processes.py  `prepare`: jobs in order, from the cache, in this process or in several
    worker.py     what one worker process runs

Invariants:
- The results do not depend on the number of processes, nor on what the cache holds.
- A job that fails in a worker is done again in this process, so errors are those of one process.
"""
