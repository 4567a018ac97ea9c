"""The result of an episode <-> rows of the run's tables, bit for bit.

Invariants:
- A branch's `loss_mask` and `turn_ids` are not stored, because its spans determine them. A branch whose arrays do not
  match its spans is refused when it is written.
- Only the journal holds the experts that a sampler chose. A reply has those of all tokens that had none before, up to
  the last but one of its end: of the prompt's new tokens and its own. So the experts of a branch are those of its
  turns, one after another.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from pydantic_core import from_json, to_json

from engine.errors import StoreError
from engine.schemas.journal import GenerationRecord
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Branch, Span, Trajectory
from engine.store.codec import ENCODER, array_bytes, array_from, damaged, json_of, plain_of, read_entry
from engine.store.reading import ENTRY
from engine.store.summaries import summary_of

_BRANCH_COLUMNS = "branch, reason, tokens, spans, input_ids, logprobs, weight_versions"
_POSTING_COLUMNS = 'seq, turn, name, delta, after, at_turn, op, cause, source, start, "end", "call"'
_BESIDE_ROWS = [field.name for field in fields(Trajectory) if field.name not in ("branches", "postings")]
_SPAN = [field.name for field in fields(Span)]
_IMAGE_SPAN = ("start", "end", "image", "grid")
_POSTING = [field.name for field in fields(Posting)]
_IMAGE = "image"
"""The key that distinguishes an image from a span in the stored list of a branch."""
_EXPERTS = "experts"
"""The key of the number of tokens with known experts in the same list."""
_beside_rows = attrgetter(*_BESIDE_ROWS)
_span_columns, _image_columns, _posting_columns = attrgetter(*_SPAN), attrgetter(*_IMAGE_SPAN), attrgetter(*_POSTING)


class EncodedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a trajectory, without the episode's number."""

    trajectory: str
    branches: list[tuple[Any, ...]]
    """(branch, reason, tokens, spans, input_ids, logprobs, weight_versions)"""
    postings: list[tuple[Any, ...]]
    """(seq, turn, name, delta, after, at_turn, op, cause, source)"""
    summary: tuple[Any, ...]
    """From `summary_of`."""

    @property
    def size(self) -> int:
        """Its approximate size in memory, in bytes."""
        return len(self.trajectory) + sum(12 * int(branch[2]) for branch in self.branches)


def encode_trajectory(trajectory: Trajectory) -> EncodedTrajectory:
    """Convert a trajectory to rows.

    Raises:
        StoreError: the arrays of a branch do not match its spans.
    """
    text = _trajectory_json(trajectory)
    branches = [_write_branch(branch, trajectory.episode_id) for branch in trajectory.branches]
    return EncodedTrajectory(
        trajectory=text,
        branches=branches,
        postings=[*map(_posting_columns, trajectory.postings)],
        summary=summary_of(trajectory, [(row[2], row[6]) for row in branches]),
    )


def _trajectory_json(trajectory: Trajectory) -> str:
    """What `json_of` writes, in a tenth of the time where msgspec writes the values of code outside the engine as
    Pydantic does."""
    columns = dict(zip(_BESIDE_ROWS, _beside_rows(trajectory), strict=True))
    outcome, messages = trajectory.outcome, trajectory.messages
    outside = [
        trajectory.facts,
        (outcome.reward, outcome.rewards),
        [(turn.rewards, turn.cost) for turn in trajectory.turns if turn.rewards or turn.cost],
        [message.signed for message in messages if message.signed],
        [call.arguments for message in messages for call in message.tool_calls],
    ]
    with suppress(ValueError, TypeError, OverflowError, RecursionError):  # `json_of` says what is wrong
        if ENCODER.encode(outside) == to_json(outside, inf_nan_mode="constants", fallback=plain_of):
            return ENCODER.encode(columns).decode()
    return json_of(columns)


def _write_branch(branch: Branch, episode_id: str) -> tuple[Any, ...]:
    size = len(branch.input_ids)
    mask, turns = _derived(branch.spans, size)
    if not (
        array_bytes(branch.loss_mask) == array_bytes(mask)
        and array_bytes(branch.turn_ids) == array_bytes(turns)
        and len(branch.logprobs) == len(branch.weight_versions) == size
    ):
        raise StoreError(f"{episode_id}: the arrays of branch {branch.index} are not those of its spans")
    if any(np.any(mask[image.start : image.end]) or image.end > size for image in branch.images):
        raise StoreError(f"{episode_id}: an image of branch {branch.index} lies outside of it, or on sampled tokens")
    images = [(_IMAGE, *_image_columns(image)) for image in branch.images]
    routed = [] if branch.routed_experts is None else [(_EXPERTS, len(branch.routed_experts))]
    spans = ENCODER.encode([*map(_span_columns, branch.spans), *images, *routed]).decode()
    return (
        branch.index,
        branch.reason,
        size,
        spans,
        array_bytes(branch.input_ids),
        array_bytes(branch.logprobs),
        array_bytes(branch.weight_versions),
    )


def _derived(spans: Sequence[Any], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute (loss mask, turn ids) from spans, each int32 [size]."""
    mask = np.zeros(size, np.int32)
    turns = np.full(size, -1, np.int32)
    for span in spans:
        if span.kind in ("generated", "unreceived"):
            mask[span.start : span.end] = span.kind == "generated"
            turns[span.start : span.end] = span.turn
    return mask, turns


def read_branch(row: Sequence[Any]) -> Branch:
    """Convert `_BRANCH_COLUMNS` to a branch without its experts. Raises StoreError if they do not hold one."""
    index, reason, size, spans, ids, logprobs, versions = row
    with damaged(f"branch {index}"):
        parts = [part for part in from_json(spans) if part[0] != _EXPERTS]
        branch = Branch.read(
            {
                "index": index,
                "reason": reason,
                "spans": [dict(zip(_SPAN, part, strict=True)) for part in parts if part[0] != _IMAGE],
                "images": [dict(zip(_IMAGE_SPAN, part[1:], strict=True)) for part in parts if part[0] == _IMAGE],
                "input_ids": array_from(ids, np.int32),
                "logprobs": array_from(logprobs, np.float32),
                "weight_versions": array_from(versions, np.int32),
                "loss_mask": (),
                "turn_ids": (),
            }
        )
        if not size == len(branch.input_ids) == len(branch.logprobs) == len(branch.weight_versions):
            raise ValueError(f"its arrays do not have {size} elements each")
        mask, turns = _derived(branch.spans, size)
        return replace(branch, loss_mask=mask, turn_ids=turns)


def read_posting(row: Sequence[Any]) -> Posting:
    """Convert `_POSTING_COLUMNS` to a posting. Raises StoreError if they do not hold one."""
    with damaged(f"posting {row[0]}"):
        return Posting.read(dict(zip(_POSTING, row, strict=True)))


def read_trajectory(connection: sqlite3.Connection, number: int, text: str) -> Trajectory:
    """Read the result of an episode, given its JSON. Raises StoreError if JSON or rows do not hold one."""
    rows = connection.execute(
        f"SELECT {_BRANCH_COLUMNS} FROM branches WHERE episode = ? ORDER BY branch", (number,)
    ).fetchall()
    branches = [read_branch(row) for row in rows]
    query = f"SELECT {_POSTING_COLUMNS} FROM postings WHERE episode = ? ORDER BY seq"
    postings = [read_posting(row) for row in connection.execute(query, (number,))]
    trajectory = with_rows(text, branches, postings)
    routed: list[int | None] = []  # how many tokens of each branch have known experts; None if they were not requested
    for row in rows:
        with damaged(f"branch {row[0]}"):
            routed.append(next((int(part[1]) for part in from_json(row[3]) if part[0] == _EXPERTS), None))
    return (
        trajectory if all(count is None for count in routed) else _with_experts(connection, number, trajectory, routed)
    )


def with_rows(text: str, branches: list[Branch], postings: list[Posting]) -> Trajectory:
    """Build a trajectory from its JSON and its rows. Raises StoreError if the JSON does not hold one."""
    with damaged("the trajectory"):
        plain = Trajectory.read(from_json(text) | {"branches": []})
        return replace(plain, branches=branches, postings=postings)


def _with_experts(
    connection: sqlite3.Connection, number: int, trajectory: Trajectory, routed: Sequence[int | None]
) -> Trajectory:
    """The trajectory with the experts of its branches, of which `routed` tokens are known each."""
    entries = connection.execute(
        f"SELECT {ENTRY} FROM journal WHERE episode = ?1 AND kind = 'generation' "
        "AND attempt = (SELECT attempt FROM trajectories WHERE episode = ?1) ORDER BY seq",
        (number,),
    )
    records = (read_entry(row).record for row in entries)
    generations = [record.generation for record in records if isinstance(record, GenerationRecord)]
    with damaged("the routing of experts"):
        by_branch: dict[int, list[np.ndarray]] = {}
        for turn, generation in zip(trajectory.turns, generations, strict=True):
            if generation.routed_experts is not None:
                by_branch.setdefault(turn.branch, []).append(generation.routed_experts)
        branches = []
        for branch, count in zip(trajectory.branches, routed, strict=True):
            if count is not None:
                experts = np.concatenate(by_branch.get(branch.index, []))
                if len(experts) != count:
                    raise ValueError(
                        f"branch {branch.index} has the experts of {len(experts)} tokens instead of {count}"
                    )
                branch = replace(branch, routed_experts=experts)
            branches.append(branch)
        return replace(trajectory, branches=branches)
