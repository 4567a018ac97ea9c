"""Trainings that are killed while they drop episodes: what `test_keep.py` launches.

Reads lines "FOLDER\tPOINT" and trains in a forked process for each, which kills itself after POINT × 10 of SQLite's instructions in
statements of a compaction; 0: never. Prints a line of JSON for each: exit status and the number of points that were passed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Any

import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (imported once, before the forks)

from engine.store import database
from engine.store import training as folders
from engine.train.trainer import Trainer

COMPACTING = ("DELETE FROM journal", "DELETE FROM branches", "INSERT INTO dropped", "VACUUM", "PRAGMA wal_checkpoint")
"""Beginnings of the statements that delete content, mark episodes and shrink the file."""


def train(folder: Path, point: int) -> int:
    """Train, and return the number of points that were passed."""
    passed, compacting = [0], [False]
    opened = database.connect_writer

    def started(statement: str) -> None:
        compacting[0] = statement.startswith(COMPACTING)

    def instruction() -> int:
        passed[0] += compacting[0]
        if compacting[0] and passed[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def connect(path: Path) -> sqlite3.Connection:
        connection = opened(path)
        if path.parent.name == "rollouts":
            connection.set_trace_callback(started)
            connection.set_progress_handler(instruction, 10)
        return connection

    database.connect_writer = connect
    asyncio.run(Trainer(folders.read_header(folder).loaded_spec(), folder).run())
    return passed[0]


def forked(folder: Path, point: int) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, str(train(folder, point)).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001  (this process must not go on as its parent)
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(read) as told:
        return {"status": status, "points": int(told.read() or 0)}


if __name__ == "__main__":
    for line in sys.stdin:
        name, _, number = line.rstrip("\n").partition("\t")
        print(json.dumps(forked(Path(name), int(number))), flush=True)
