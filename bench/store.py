"""What writing the journal costs: CPU microseconds an entry, at several numbers of episodes at once.

    python bench/store.py [--entries 20000] [--repeats 3]

Each episode writes turns of two entries: a generation (128 tokens with log-probs) and a tool's answer. The CPU
time is the whole process's, the writer thread's share included. Beside it, in the same run, the floor: the same
bytes, encoded beforehand, given to `executemany` of one thread, as many to a commit as there are episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.schemas.environment import Task
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import GenerationRecord, JournalEntry, Record, ToolsRecord
from engine.schemas.message import ToolResult
from engine.store import RunHeader, RunStore, codec, database, new_run_id

TURNS = 16


def records() -> tuple[Record, Record]:
    """One turn: what the model said and what the tool answered."""
    rng = np.random.default_rng(0)
    generation = Generation.read(
        {
            "output_ids": rng.integers(0, 150_000, 128),
            "logprobs": -rng.exponential(size=128),
            "finish": FinishReason(type="stop", matched=151645),
            "versions": [VersionSpan(version=0, start=0, end=128)],
            "prompt_tokens": 412,
            "cached_tokens": 380,
            "seconds": 0.23,
        }
    )
    answer = "408\n" + "The expression 12 * 34 was evaluated with exact integer arithmetic. " * 2
    result = ToolResult(call_id="call_0_0", name="calculate", content=answer, seconds=0.0004)
    return GenerationRecord(generation=generation), ToolsRecord(results=[result])


def entry(seq: int, record: Record) -> JournalEntry:
    """The `seq`-th entry of an episode, as the executor makes it."""
    if seq % 2 == 0:
        state, event, dest = "GENERATING", "tool_calls", "AWAITING_TOOL"
    else:
        state, event, dest = "AWAITING_TOOL", "results", "GENERATING"
    return JournalEntry(seq=seq, state=state, event=event, dest=dest, record=record, at=1.7e9 + seq, seconds=0.2)


async def through_store(folder: Path, live: int, entries: int) -> tuple[float, float]:
    """(CPU µs, wall µs) an entry, making the entry included."""
    header = RunHeader(run_id=new_run_id("bench"), name="bench", created=time.time(), engine_version="0", spec={})
    turn = records()
    with RunStore.create(folder, header) as store:
        episodes = iter(range(max(live, entries // (2 * TURNS))))
        written = 0

        async def crew() -> None:
            nonlocal written
            for index in episodes:
                journal = await store.begin(Task(id=str(index), index=index, fields={}), 0)
                for seq in range(2 * TURNS):
                    await journal.append(entry(seq, turn[seq % 2]), codec.encode_record(turn[seq % 2]))
                    written += 1

        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(crew() for _ in range(live)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / written * 1e6, wall / written * 1e6


def raw(folder: Path, live: int, entries: int) -> tuple[float, float]:
    """(CPU µs, wall µs) an entry for `executemany` of rows that are there already."""
    path = folder / f"raw-{live}-{time.time_ns()}.db"
    database.create_tables(path)
    connection = database.connect_writer(path)
    columns = [(made.kind, made.payload, made.tokens) for made in map(codec.encode_record, records())]
    rows = []
    for episode in range(0, max(live, entries // (2 * TURNS)), live):
        for seq in range(2 * TURNS):
            head = ("GENERATING", "tool_calls", "AWAITING_TOOL") if seq % 2 == 0 else ("AWAITING_TOOL", "results", "G")
            rows += [(episode + n, 0, seq, *head, *columns[seq % 2], 1.7e9, 0.2) for n in range(live)]
    statement = f"INSERT INTO journal VALUES ({', '.join('?' * database.COLUMNS['journal'])})"
    cpu, wall = time.process_time(), time.perf_counter()
    for start in range(0, len(rows), live):
        connection.execute("BEGIN")
        connection.executemany(statement, rows[start : start + live])
        connection.execute("COMMIT")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    connection.close()
    return cpu / len(rows) * 1e6, wall / len(rows) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"sqlite {sqlite3.sqlite_version}; a turn is two entries; best of {options.repeats}")
    print(f"{'episodes':>8} {'store cpu':>10} {'store wall':>11} {'raw cpu':>8} {'raw wall':>9}   µs an entry")
    with tempfile.TemporaryDirectory() as name:
        for live in (1, 64, 256):
            count = options.entries // 8 if live == 1 else options.entries
            stores, floors = [], []
            for _ in range(options.repeats):
                stores.append(asyncio.run(through_store(Path(name), live, count)))
                floors.append(raw(Path(name), live, count))
            store, floor = min(stores), min(floors)
            print(f"{live:8} {store[0]:10.1f} {store[1]:11.1f} {floor[0]:8.1f} {floor[1]:9.1f}")


if __name__ == "__main__":
    main()
