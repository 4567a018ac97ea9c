"""Runs for tests of views: real stores with episodes of known results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from journals import write_entries, write_result
from store_kit import make_entry, make_header, make_task, make_trajectory

from engine.schemas.environment import UserTurn
from engine.schemas.journal import FailureRecord, JournalEntry, UserRecord
from engine.schemas.message import ImagePart, Message
from engine.schemas.trajectory import Failure, Outcome, Trajectory
from engine.store import RunStore
from engine.store.journal import Journal
from engine.store.training import begin as begin_training
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.metrics import MetricsLog

TRAINING = "demo-train-20260101-000000-abcd"
LEVELS = ("easy", "hard")


def failure(kind: str = "tool_timeout", **changes: Any) -> Failure:
    """A failure of a tool."""
    values = {"blame": "tool", "message": "tool `t` took longer than 5 s", "state": "AWAITING_TOOL", "turn": 1}
    return Failure(kind=kind, **values | changes)


def ended(index: int, sample: int) -> Trajectory:
    """An episode of task t<index>: tasks 0, 3, 6 … fail, 1, 4, 7 … are stopped by a limit, the others are solved."""
    reward = float(index + sample)
    outcome: Mapping[str, Any] = {
        0: {"state": "DONE", "event": "failed", "failure": failure(), "trainable": False},
        1: {"state": "DONE", "event": "limit", "limit": "assistant_turns"},
        2: {"state": "DONE", "event": "satisfied", "solved": True, "solved_turn": 1},
    }[index % 3]
    made = make_trajectory(index, sample, branches=1 + index % 2)
    rewards = {"answer": reward, "format": -1.0}
    picture = [ImagePart(image="sha256:" + "0" * 64)] if index == 2 else []
    messages = [
        *made.messages,
        Message(role="user", content=[*picture]),
        Message(role="user", content=f'said "{index}"\nÄpfel'),
    ]
    facts = {"tries": index} if index % 2 else {}
    counts = made.counts | {"user_turns": 1, "tool_calls": 2}
    whole = Outcome(**{"reward": reward - 1.0, "rewards": rewards} | dict(outcome))
    return replace(made, outcome=whole, messages=messages, facts=facts, counts=counts)


async def fill(
    store: RunStore, tasks: int = 6, samples: int = 2, *, of: Any = ended, first: int = 0, **fields: Any
) -> None:
    """Write finished episodes; `fields` replaces fields of the tasks."""
    for index in range(first, first + tasks):
        task = make_task(index, **{"level": LEVELS[index % 2], "answer": str(index)} | fields)
        for sample in range(samples):
            begun = await store.begin(task, sample)
            made = of(index, sample)
            last = JournalEntry(
                seq=0,
                state="GENERATING",
                event="failed",
                dest="DONE",
                record=FailureRecord(failure=failure()),
                at=1.0,
                seconds=0.5,
            )
            said = UserTurn(content="no", solved=index > 2, facts={"wrong": index}) if index else None
            if said is not None:
                first_entry = replace(last, record=UserRecord(turn=UserTurn(content="first")))
                await write_entries(begun, first_entry)
                await write_entries(begun, replace(last, seq=1, record=UserRecord(turn=said)))
            await write_entries(begun, replace(last, seq=2 if said else 0))
            await write_result(begun, made)


async def begin(store: RunStore, index: int, entries: int) -> Journal:
    """Begin an episode, which stays unfinished."""
    task = make_task(index, level=LEVELS[index % 2], answer=str(index))
    begun = await store.begin(task, 0)
    for seq in range(entries):
        await write_entries(begun, make_entry(seq))
    return begun


def new_run(out: Path, run_id: str = "run-20260101-000000-abcd", **header: Any) -> RunStore:
    """A new run, open for writing."""
    return RunStore.create(out, make_header(run_id, **header))


def batch_record(step: int, used: list[int], left_out: list[int], **changes: object) -> BatchRecord:
    """Group n is of task t<n>."""
    tasks = {str(number): f"t{number}" for number in (*used, *left_out)}
    return BatchRecord(step, step, used, left_out, [], tasks, **changes)  # type: ignore[arg-type]


async def make_training(out: Path) -> Path:
    """A training: two steps with three and two tasks, an evaluation after step 2."""
    folder = begin_training(out, make_header(TRAINING, spec={"train": {"steps": 5}}, created=5.0))
    with new_run(folder, "rollouts") as store:
        await fill(store, 6, 2)
    with new_run(folder / "evals", "step-000002", evaluation=True) as store:
        await fill(store, 2, 1)
    log = BatchLog(folder)
    log.append(batch_record(1, [0, 2], [1]))
    log.append(batch_record(2, [3, 4], []))
    metrics = MetricsLog(folder)
    metrics.write(1, {"reward/mean": 0.5, "loss": float("nan")})
    metrics.write(2, {"reward/mean": 0.75, "eval/reward": 0.1})
    for file in ("metrics.jsonl", "batches.jsonl"):  # a step that is being written
        with (folder / file).open("a") as opened:
            opened.write('{"step": 3, "us')
    return folder
