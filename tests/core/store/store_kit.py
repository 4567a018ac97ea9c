"""What the store's tests write: real contracts of every kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from engine.schemas.base import Contract, Struct
from engine.schemas.environment import Reset, Task
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import GenerationRecord, JournalEntry, ResetRecord, ToolsRecord
from engine.schemas.message import Message, ToolCall, ToolResult
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Branch, Outcome, Span, Trajectory, Turn
from engine.store import RunHeader


def make_header(run_id: str = "run-20260101-000000-abcd", **changes: Any) -> RunHeader:
    """A header of no particular spec."""
    return RunHeader(
        **{"run_id": run_id, "name": "run", "created": time.time(), "engine_version": "0.1.0", "spec": {}} | changes
    )


def make_task(index: int = 0, **fields: Any) -> Task:
    """Task `t<index>`."""
    return Task(id=f"t{index}", index=index, fields=fields or {"question": f"{index} + 1?"})


def make_entry(seq: int, seed: int = 0, tokens: int = 16) -> JournalEntry:
    """A reset first, then generations and tool results by turns; the content depends on seed and seq alone."""
    rng = np.random.default_rng([seed, seq])
    if seq == 0:
        record: Any = ResetRecord(reset=Reset(messages=[Message(role="user", content=f"q{seed}")], facts={"n": seed}))
        state, event, dest = "PENDING", "ready", "GENERATING"
    elif seq % 2:
        bits = rng.integers(0, 2**32, tokens, dtype=np.uint32).view(np.float32)  # NaN and infinities among them
        generation = Generation.read(
            {
                "output_ids": rng.integers(0, 2**31, tokens),
                "logprobs": bits,
                "finish": FinishReason(type="stop", matched=7),
                "versions": [VersionSpan(version=seq, start=0, end=tokens)],
                "seconds": float(rng.random()),
            }
        )
        record = GenerationRecord(generation=generation)
        state, event, dest = "GENERATING", "tool_calls", "AWAITING_TOOL"
    else:
        result = ToolResult(call_id=f"call_{seq}", name="t", content=f"{seed}:{seq} é\n", seconds=float(rng.random()))
        record = ToolsRecord(results=[result])
        state, event, dest = "AWAITING_TOOL", "results", "GENERATING"
    return JournalEntry(
        seq=seq, state=state, event=event, dest=dest, record=record, at=1.7e9 + seq / 3, seconds=float(rng.random())
    )


def make_trajectory(index: int = 0, sample: int = 0, *, seed: int = 1, branches: int = 2, **changes: Any) -> Trajectory:
    """A finished episode of task `t<index>`: one turn a branch, rewards moved between turns."""
    rng = np.random.default_rng([index, sample, seed])
    made, turns = [], []
    for number in range(branches):
        spans = [
            Span(kind="prompt", start=0, end=4),
            Span(kind="generated", start=4, end=9, turn=number),
            Span(kind="closing", start=9, end=10),
        ]
        mask = np.array([0] * 4 + [1] * 5 + [0], np.int32)
        made.append(
            Branch.read(
                {
                    "index": number,
                    "reason": "" if number == 0 else "the template dropped old reasoning",
                    "spans": spans,
                    "input_ids": rng.integers(0, 1000, 10),
                    "loss_mask": mask,
                    "logprobs": -rng.random(10, np.float32) * mask,
                    "weight_versions": np.where(mask, 2, -1),
                    "turn_ids": np.where(mask, number, -1),
                }
            )
        )
        turns.append(
            Turn(
                index=number,
                branch=number,
                start=4,
                end=9,
                finish=FinishReason(type="stop", matched=2),
                event="answered",
                rewards={"reward": 0.5},
                seconds=0.25,
            )
        )
    postings = [
        Posting(seq=0, turn=0, name="reward", delta=1.0, after=1.0, at_turn=0, op="add", cause="right", source="user"),
    ]
    if branches > 1:
        postings += [
            Posting(seq=1, turn=0, name="reward", delta=-0.5, after=0.5, at_turn=1, op="transfer", source="rule:0"),
            Posting(seq=2, turn=1, name="reward", delta=0.5, after=0.5, at_turn=1, op="transfer", source="rule:0"),
            Posting(seq=3, turn=1, name="reward", delta=-0.0, after=0.5, at_turn=1, op="add", source="score"),
        ]
    fields: dict[str, Any] = {
        "run_id": "run-20260101-000000-abcd",
        "episode_id": f"t{index}/{sample}",
        "task_id": f"t{index}",
        "sample_index": sample,
        "seed": 2**62 + sample,
        "history": "branch",
        "outcome": Outcome(state="DONE", event="satisfied", solved=True, reward=1.0, rewards={"reward": 1.0}),
        "messages": [
            Message(role="user", content=f"{index} + 1?"),
            Message(
                role="assistant", content="let me see", tool_calls=[ToolCall(id="c", name="add", arguments={"a": 1})]
            ),
            Message(role="tool", content=str(index + 1), tool_call_id="c", name="add"),
            Message(role="assistant", content=f"{index + 1}"),
        ],
        "turns": turns,
        "branches": made,
        "postings": postings,
        "facts": {"tries": 2, "ratio": 0.1},
        "path": [("PENDING", "ready", "GENERATING"), ("GENERATING", "answered", "DONE")],
        "counts": {"sampled_tokens": 5 * branches},
        "seconds": {"GENERATING": 0.1},
    }
    return Trajectory(**fields | changes)


def same(left: Any, right: Any) -> bool:
    """Whether two contracts are equal, arrays bit for bit (NaN equals the same NaN)."""
    return plain(left) == plain(right)


def plain(value: Any) -> Any:
    """A contract as data that can be compared: arrays as their type and bytes, floats as their digits."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, Struct):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Contract):
        return {name: plain(item) for name, item in value}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Maker:
    """Names for the functions above, for tests to reach them through a fixture."""

    header: Callable[..., RunHeader] = staticmethod(make_header)
    task: Callable[..., Task] = staticmethod(make_task)
    entry: Callable[..., JournalEntry] = staticmethod(make_entry)
    trajectory: Callable[..., Trajectory] = staticmethod(make_trajectory)
    same: Callable[[Any, Any], bool] = staticmethod(same)
    plain: Callable[[Any], Any] = staticmethod(plain)
