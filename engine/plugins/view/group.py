"""The samples of one task side by side, with the place where each two of them part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from engine.plugins.show.listing.episode import common_start
from engine.plugins.show.listing.texts import texts_of
from engine.store.shown_messages import reply_numbers

if TYPE_CHECKING:
    from engine.plugins.show.listing.rows import Row
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader

_AROUND = 12
"""Number of tokens that are shown from the place where two samples part."""
MOST = 16
"""Maximum number of samples in one document."""


def group_document(store: RunReader, task_id: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the samples of a task, and where each two finished ones part.

    Args:
        store: The run.
        task_id: The task.
        rows: Its samples, from `Listing.group`.

    Raises:
        StoreError: a record is damaged.
    """
    shown = rows[:MOST]
    finished = {row.sample: store.trajectory(row.episode) for row in shown if row.status == "done"}
    return {
        "run": store.run_id,
        "task": task_id,
        "samples": [row.plain() | {"id": row.episode} for row in shown],
        "left_out": len(rows) - len(shown),
        "parts": [
            {"first": first, "second": second, **parting(store, finished[first], finished[second])}
            for first, second in combinations(sorted(finished), 2)
        ],
    }


def parting(store: RunReader, first: Trajectory, second: Trajectory) -> dict[str, Any]:
    """Return the first place where two samples of a task differ: in a reply, or in what was said between two replies.

    `turn` is the turn in which they differ; -1 for the prompt, None if they are the same as far as both go. For a difference between
    replies, `message` is true and `turn` is the turn before it. `token` counts from the first sampled token of the turn.
    """
    replies = reply_numbers(first), reply_numbers(second)
    before = 0
    for turn in range(max(len(first.turns), len(second.turns)) + 1):
        ends = [each[turn] if turn < len(each) else None for each in replies]
        said = [
            [(message.role, message.content) for message in each.messages[before:end]]
            for each, end in zip((first, second), ends, strict=True)
        ]
        if said[0] != said[1] and None not in ends:
            return {"turn": turn - 1, "message": True, "token": None, "texts": None}
        if None in ends:
            alike = ends[0] is ends[1] and said[0] == said[1]
            return {"turn": None if alike else turn - 1, "message": not alike, "token": None, "texts": None}
        ids = _ids(first, first.turns[turn]), _ids(second, second.turns[turn])
        token = common_start(*ids)
        if token < max(len(ids[0]), len(ids[1])):
            texts = [texts_of(store).decode(each[token : token + _AROUND].tolist()) for each in ids]
            return {"turn": turn, "message": False, "token": token, "texts": texts}
        words = first.messages[replies[0][turn]].text, second.messages[replies[1][turn]].text
        if words[0] != words[1]:  # a backend that gives no ids
            return {"turn": turn, "message": False, "token": None, "texts": None}
        before = replies[0][turn] + 1
    raise AssertionError("the loop ends at the turn that one of them does not have")


def _ids(trajectory: Trajectory, turn: Turn) -> Any:
    branch = trajectory.branches[turn.branch]
    return branch.input_ids[turn.start : turn.end]
