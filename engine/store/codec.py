"""Contracts -> columns, and back, bit for bit.

Invariants:
- What is read equals what was written: token arrays travel as raw little-endian bytes (NaN payloads and
  infinities included), floats in JSON as their shortest exact digits.
- A branch's `loss_mask` and `turn_ids` are not stored: its spans determine them. A branch of which that is not
  true is refused when it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json

from engine.errors import StoreError, WorldError
from engine.schemas.generation import Generation
from engine.schemas.journal import (
    GenerationRecord,
    JournalEntry,
    Record,
    ResetRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Blame, Branch, Trajectory
from engine.storable import MAX_SIZE, refusal, valid_text

_ARRAYS = {"generation": {"output_ids", "logprobs"}}
_APART = {"branches", "postings"}
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


def json_text(model: BaseModel, exclude: Any = None) -> str:
    """A contract as JSON.

    Raises:
        WorldError: it holds something that JSON cannot say. Worlds alone can put that there.
    """
    try:
        return model.model_dump_json(exclude=exclude, fallback=_plain, warnings=False)
    except PydanticSerializationError as error:
        raise _unsayable(str(error)) from error


def json_of(value: Any) -> str:
    """A plain value as JSON, NaN and infinities kept.

    Raises:
        WorldError: as in `json_text`.
    """
    try:
        return to_json(value, inf_nan_mode="constants", fallback=_plain).decode()
    except PydanticSerializationError as error:
        raise _unsayable(str(error)) from error


def _unsayable(problem: str) -> WorldError:
    return WorldError(
        f"the answer cannot be stored: {problem}. Facts, results and task fields must be JSON: "
        "null, booleans, finite numbers, strings, lists and dicts of these",
        blame="environment",
        kind="not_json",
    )


_SPEAKERS: dict[str, Blame] = {"user": "user", "tools": "tool", "generation": "backend"}
"""Who said what a record of that kind holds; otherwise the environment."""


class Draft(msgspec.Struct, frozen=True):
    """A journal entry in the making: the fields of `JournalEntry`."""

    seq: int
    state: str
    event: str
    dest: str
    record: Record
    at: float
    seconds: float


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

    entry: Draft
    written: Written


def write_record(record: Record) -> Written:
    """A journal record -> columns.

    Raises:
        WorldError: it holds what `engine.storable` refuses; to blame is who said it.
    """
    try:
        if isinstance(record, GenerationRecord):
            generation = record.generation
            tokens = array_bytes(generation.output_ids) + array_bytes(generation.logprobs)
            text = _generation_text(generation) or json_text(record, _ARRAYS)
            return Written("generation", text, tokens, record)
        if isinstance(record, ToolsRecord) and (text := _results_text(record) or ""):
            return Written("tools", text, None, record)
        return _write_loose(record)
    except WorldError as error:
        error.blame = _SPEAKERS.get(record.kind, "environment")
        raise


def _write_loose(record: Record) -> Written:
    """Columns of a record whose contents the contracts leave open in part, or that was not validated.

    Raises:
        WorldError: it cannot be written and read back.
    """
    try:
        problem = next(filter(None, (refusal(loose) for loose in _loose(record))), None)
        if problem is not None:
            raise _unsayable(problem)
        text = json_text(record)
        if len(text) > 4 * MAX_SIZE:
            raise _unsayable(f"it has {len(text):,} characters as JSON; {4 * MAX_SIZE:,} are allowed")
        return Written(record.kind, text, None, type(record).model_validate_json(text))
    except (ValueError, TypeError, AttributeError) as error:  # a contract that was built without validation
        raise _unsayable(valid_text(str(error), 1000)) from error


def _loose(record: Record) -> Iterator[Mapping[str, Any]]:
    """The parts of a world's answer that hold any JSON: facts, fields of templates, arguments of worked examples."""
    messages: Sequence[Any] = ()
    if isinstance(record, ToolsRecord):
        yield from ({f"results[{at}].facts": result.facts} for at, result in enumerate(record.results) if result.facts)
    elif isinstance(record, UserRecord):
        yield {"facts": record.turn.facts, "fields": record.turn.fields}
    elif isinstance(record, StepRecord):
        yield {"facts": record.step.facts}
        messages = record.step.messages
    elif isinstance(record, ResetRecord):
        yield {"facts": record.reset.facts}
        messages = record.reset.messages
    for at, message in enumerate(messages):
        yield from ({f"messages[{at}].{call.name}": call.arguments} for call in message.tool_calls)


def _generation_text(generation: Generation) -> str | None:
    """`json_text` of an ordinary generation's record, without its arrays, at a third of the cost; None for another one."""
    finish, text = generation.finish, generation.text
    if text is not None or not isfinite(generation.seconds + generation.queue_seconds):
        return None
    told = {
        "finish": finish.__dict__,
        "versions": [span.__dict__ for span in generation.versions],
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "seconds": generation.seconds,
        "queue_seconds": generation.queue_seconds,
        "text": None,
    }
    return _dumped({"kind": "generation", "generation": told})


def _results_text(record: ToolsRecord) -> str | None:
    """`json_text` of results that are texts and nothing else, likewise."""
    results = record.results
    if any(type(result.content) is not str or result.rewards or result.facts for result in results):
        return None
    if sum(len(result.content) for result in results) > MAX_SIZE:
        return None
    return _dumped({"kind": "tools", "results": [result.__dict__ for result in results]})


def _dumped(value: Any) -> str | None:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # half of a character, say: `json_text` tells what is wrong with it
        return None


def entry_row(entry: JournalEntry | Draft, written: Written | None = None) -> tuple[Any, ...]:
    """A journal entry -> columns (seq, state, event, dest, kind, payload, tokens, at, seconds).

    Args:
        entry: The entry.
        written: Its record in columns, where that is made already.
    """
    kind, payload, tokens = (made := written or write_record(entry.record)).kind, made.payload, made.tokens
    return entry.seq, entry.state, entry.event, entry.dest, kind, payload, tokens, entry.at, entry.seconds


def read_entry(row: Sequence[Any]) -> JournalEntry:
    """Columns (seq, state, event, dest, kind, payload, tokens, at, seconds) -> the entry."""
    seq, state, event, dest, kind, payload, tokens, at, seconds = row
    record = from_json(payload)
    if kind == "generation":
        half = len(tokens) // 2
        record["generation"]["output_ids"] = array_from(tokens[:half], np.int32)
        record["generation"]["logprobs"] = array_from(tokens[half:], np.float32)
    return JournalEntry(seq=seq, state=state, event=event, dest=dest, record=record, at=at, seconds=seconds)


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
        json_text(trajectory, _APART),
        [_write_branch(branch, trajectory.episode_id) for branch in trajectory.branches],
        [(p.seq, p.turn, p.name, p.delta, p.after, p.at_turn, p.op, p.cause, p.source) for p in trajectory.postings],
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
    said: list[tuple[Any, ...]] = [(span.kind, span.start, span.end, span.turn) for span in branch.spans]
    seen = [(_IMAGE, image.start, image.end, image.image, image.grid) for image in branch.images]
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
    """Columns (branch, reason, tokens, spans, input_ids, logprobs, weight_versions) -> the branch."""
    index, reason, size, spans, ids, logprobs, versions = row
    kinds = from_json(spans)
    plain = Branch.model_validate(
        {
            "index": index,
            "reason": reason,
            "spans": [
                {"kind": span[0], "start": span[1], "end": span[2], "turn": span[3]}
                for span in kinds
                if span[0] != _IMAGE
            ],
            "images": [
                {"start": span[1], "end": span[2], "image": span[3], "grid": span[4]}
                for span in kinds
                if span[0] == _IMAGE
            ],
            "input_ids": array_from(ids, np.int32),
            "logprobs": array_from(logprobs, np.float32),
            "weight_versions": array_from(versions, np.int32),
            "loss_mask": (),
            "turn_ids": (),
        }
    )
    mask, turns = _derived(plain.spans, size)
    return plain.model_copy(update={"loss_mask": mask, "turn_ids": turns})


def read_posting(row: Sequence[Any]) -> Posting:
    """Columns (seq, turn, name, delta, after, at_turn, op, cause, source) -> the posting."""
    names = ("seq", "turn", "name", "delta", "after", "at_turn", "op", "cause", "source")
    return Posting.model_validate(dict(zip(names, row, strict=True)))


def read_trajectory(text: str, branches: list[Branch], postings: list[Posting]) -> Trajectory:
    """The JSON of a trajectory and its rows -> the trajectory."""
    return Trajectory.model_validate(from_json(text) | {"branches": branches, "postings": postings})
