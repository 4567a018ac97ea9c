"""Contracts -> columns, and back, bit for bit.

Invariants:
- What is read equals what was written: token arrays travel as raw little-endian bytes (NaN payloads and
  infinities included), floats in JSON as their shortest exact digits.
- A branch's `loss_mask` and `turn_ids` are not stored: its spans determine them. A branch of which that is not
  true is refused when it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from engine.errors import StoreError, WorldError
from engine.schemas.generation import Generation
from engine.schemas.journal import JournalEntry, Record
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Branch, EpisodeScore, Span, Trajectory
from engine.storable import MAX_SIZE, refusal, valid_text

_BESIDE_ARRAYS = [field.name for field in fields(Generation) if field.name not in ("output_ids", "logprobs")]
_BESIDE_ROWS = [field.name for field in fields(Trajectory) if field.name not in ("branches", "postings")]
_SPAN = [field.name for field in fields(Span)]
_IMAGE_SPAN = ("start", "end", "image", "grid")
_POSTING = [field.name for field in fields(Posting)]
_IMAGE = "image"
"""Marks an image among a branch's spans."""
_SWAP = sys.byteorder == "big"


def array_bytes(array: np.ndarray) -> bytes:
    """A 4-byte array of any shape -> little-endian bytes, in C order."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes() if _SWAP else array.tobytes()


def array_from(data: bytes, dtype: type[np.int32] | type[np.float32]) -> np.ndarray:
    """Little-endian bytes -> an array [n] of its own, writable and in the machine's byte order."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(data, dtype=little).astype(dtype)


def _plain(value: Any) -> Any:
    """What worlds put into facts that JSON does not know but can say."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} is no JSON")


def json_of(value: Any) -> str:
    """A plain value, a contract or a struct as JSON, NaN and infinities kept.

    Raises:
        WorldError: it holds something that JSON cannot say. Only code outside the engine can put that there.
    """
    try:
        return to_json(value, inf_nan_mode="constants", fallback=_plain).decode()
    except PydanticSerializationError as error:
        raise _unsayable(valid_text(str(error), 1000)) from error


def _unsayable(problem: str) -> WorldError:
    return WorldError(
        f"the answer cannot be stored: {problem}. Facts, results and task fields must be JSON: "
        "null, booleans, finite numbers, strings, lists and dicts of these",
        blame="environment",
        kind="not_json",
    )


class Written(msgspec.Struct, frozen=True):
    """A journal record in columns."""

    kind: str
    payload: str
    """The record's JSON, without a generation's two arrays."""
    tokens: bytes | None
    """For a generation: int32 ids, then as many float32 log-probs."""
    record: Record
    """The record as it is read back: an episode goes on with this one, so that a replay does the same."""

    @property
    def size(self) -> int:
        """Its weight in memory, about, in bytes."""
        return len(self.payload) + (len(self.tokens) if self.tokens else 0)


class Ending(NamedTuple):
    """An episode's last entry, which is written in the same commit as the episode's end."""

    entry: JournalEntry
    written: Written


def write_record(record: Record) -> Written:
    """A journal record -> columns.

    Raises:
        WorldError: it holds what `engine.storable` refuses; to blame is who said it.
    """
    try:
        if record.kind == "generation":
            generation = record.generation
            tokens = array_bytes(generation.output_ids) + array_bytes(generation.logprobs)
            said = {name: getattr(generation, name) for name in _BESIDE_ARRAYS}
            return Written("generation", json_of({"kind": "generation", "generation": said}), tokens, record)
        answers = record.answers()
        problem = next(filter(None, (refusal({place: answer}) for place, answer in (answers or {}).items())), None)
        if problem is not None:
            raise _unsayable(problem)
        text = json_of(record)
        if len(text) > 4 * MAX_SIZE:
            raise _unsayable(f"it has {len(text):,} characters as JSON; {4 * MAX_SIZE:,} are allowed")
        return Written(record.kind, text, None, record if answers is None else type(record).read_json(text))
    except WorldError as error:
        error.blame = record.blame
        raise
    except (ValueError, TypeError, AttributeError) as error:  # an answer that was built without validation
        fault = _unsayable(valid_text(str(error), 1000))
        fault.blame = record.blame
        raise fault from error


def entry_row(entry: JournalEntry, written: Written | None = None) -> tuple[Any, ...]:
    """A journal entry -> columns (seq, state, event, dest, kind, payload, tokens, at, seconds).

    Args:
        entry: The entry.
        written: Its record in columns, where that is made already.
    """
    kind, payload, tokens = (made := written or write_record(entry.record)).kind, made.payload, made.tokens
    return entry.seq, entry.state, entry.event, entry.dest, kind, payload, tokens, entry.at, entry.seconds


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Raise `StoreError` with the record's name for stored bytes that are not of its form."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # JSON, contracts, arrays
        lines = valid_text(str(error)).splitlines() or [type(error).__name__]
        raise StoreError(f"{what} is damaged ({' '.join(lines[:3])[:200]})") from error


def read_entry(row: Sequence[Any]) -> JournalEntry:
    """Columns (seq, state, event, dest, kind, payload, tokens, at, seconds) -> the entry.

    Raises:
        StoreError: they are not those of an entry.
    """
    seq, state, event, dest, kind, payload, tokens, at, seconds = row
    with damaged(f"journal entry {seq} (`{kind}`)"):
        record = from_json(payload)
        if record["kind"] != kind:
            raise ValueError(f"its payload is of kind {record['kind']!r}")
        if kind == "generation":
            half = len(tokens) // 2
            record["generation"]["output_ids"] = array_from(tokens[:half], np.int32)
            record["generation"]["logprobs"] = array_from(tokens[half:], np.float32)
        told = {"seq": seq, "state": state, "event": event, "dest": dest, "record": record, "at": at}
        return JournalEntry.read(told | {"seconds": seconds})


class WrittenTrajectory(NamedTuple):
    """A trajectory in rows, without the episode's number."""

    trajectory: str
    branches: list[tuple[Any, ...]]
    """(branch, reason, tokens, spans, input_ids, logprobs, weight_versions)"""
    postings: list[tuple[Any, ...]]
    """(seq, turn, name, delta, after, at_turn, op, cause, source)"""


def write_trajectory(trajectory: Trajectory) -> WrittenTrajectory:
    """A trajectory -> rows.

    Raises:
        StoreError: a branch's arrays are not those of its spans.
    """
    return WrittenTrajectory(
        json_of({name: getattr(trajectory, name) for name in _BESIDE_ROWS}),
        [_write_branch(branch, trajectory.episode_id) for branch in trajectory.branches],
        [tuple(getattr(posting, name) for name in _POSTING) for posting in trajectory.postings],
    )


def _write_branch(branch: Branch, episode_id: str) -> tuple[Any, ...]:
    size = len(branch.input_ids)
    mask, turns = _derived(branch.spans, size)
    if not (
        np.array_equal(branch.loss_mask, mask)
        and np.array_equal(branch.turn_ids, turns)
        and len(branch.logprobs) == len(branch.weight_versions) == size
    ):
        raise StoreError(f"{episode_id}: the arrays of branch {branch.index} are not those of its spans")
    if any(np.any(mask[image.start : image.end]) or image.end > size for image in branch.images):
        raise StoreError(f"{episode_id}: an image of branch {branch.index} lies outside of it, or on sampled tokens")
    said = [tuple(getattr(span, name) for name in _SPAN) for span in branch.spans]
    seen = [(_IMAGE, *(getattr(image, name) for name in _IMAGE_SPAN)) for image in branch.images]
    spans = to_json([*said, *seen]).decode()
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
    """Spans -> (loss mask, turn ids), int32 [size]."""
    mask = np.zeros(size, np.int32)
    turns = np.full(size, -1, np.int32)
    for span in spans:
        if span.kind == "generated":
            mask[span.start : span.end] = 1
            turns[span.start : span.end] = span.turn
    return mask, turns


def read_branch(row: Sequence[Any]) -> Branch:
    """Columns (branch, reason, tokens, spans, input_ids, logprobs, weight_versions) -> the branch.

    Raises:
        StoreError: they are not those of a branch.
    """
    index, reason, size, spans, ids, logprobs, versions = row
    with damaged(f"branch {index}"):
        parts = from_json(spans)
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
    """Columns (seq, turn, name, delta, after, at_turn, op, cause, source, start, end, call) -> the posting.

    Raises:
        StoreError: they are not those of a posting.
    """
    with damaged(f"posting {row[0]}"):
        return Posting.read(dict(zip(_POSTING, row, strict=True)))


def read_trajectory(text: str, branches: list[Branch], postings: list[Posting]) -> Trajectory:
    """The JSON of a trajectory and its rows -> the trajectory.

    Raises:
        StoreError: it is not that of a trajectory.
    """
    with damaged("the trajectory"):
        plain = Trajectory.read(from_json(text) | {"branches": []})
        return replace(plain, branches=branches, postings=postings)


def read_score(text: str) -> EpisodeScore:
    """The JSON of an episode's score -> the score.

    Raises:
        StoreError: it is not that of a score.
    """
    with damaged("the score"):
        return EpisodeScore.read(from_json(text))
