"""Writes episodes until it is killed, and says what it was told is durable.

Run by test_kill.py as a process of its own. For each line `FOLDER TASKS` on stdin it forks a child that writes
(a fork costs a hundredth of a start). The child says `begun PID`, and then `entry EPISODE SEQ` and `done EPISODE`,
each after the store's answer; its end is told as `dead STATUS`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from store_kit import make_entry, make_header, make_task, make_trajectory  # type: ignore[import-not-found]  # noqa: E402

from engine.store import RunStore, list_runs  # noqa: E402
from engine.store.codec import encode_record  # noqa: E402

ENTRIES = 5


def say(*words: object) -> None:
    """One write, so that a line is there whole or not at all."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(folder: Path, alive: int) -> None:
    """Begin or resume the run in `folder`, and go on for ever."""
    runs = list_runs(folder)
    store = RunStore.open(runs[0]) if runs else RunStore.create(folder, make_header())
    done = store.finished()
    fresh = itertools.count()
    say("begun", os.getpid())

    async def crew() -> None:
        for index in fresh:
            if f"t{index}/0" in done:
                continue
            journal = await store.begin(make_task(index), 0)
            for seq in range(len(journal.entries), ENTRIES):
                entry = make_entry(seq, index)
                await journal.append(entry, encode_record(entry.record))
                say("entry", index, seq)
            await journal.finish(partial(make_trajectory, index))
            say("done", index)

    await asyncio.gather(*(crew() for _ in range(alive)))


def serve() -> None:
    """Fork a writer for each line on stdin."""
    for line in sys.stdin:
        folder, alive = line.split()
        child = os.fork()
        if child == 0:
            asyncio.run(main(Path(folder), int(alive)))
            os._exit(0)
        say("dead", os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve()
