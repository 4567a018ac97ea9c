"""Records <-> database columns, bit for bit.

Invariants:
- What is read equals what was written: token arrays are stored as raw little-endian bytes (with NaN payloads and
  infinities), floats in JSON with the fewest digits that give the same float.
- A branch's `loss_mask` and `turn_ids` are not stored, because its spans determine them. A branch whose arrays do not
  match its spans is refused when it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from math import prod
from operator import attrgetter, methodcaller
from typing import Any

import msgspec
import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from engine.errors import SpecCodeError, StoreError
from engine.schemas.experts import pack_experts
from engine.schemas.generation import Generation
from engine.schemas.journal import GenerationRecord, JournalEntry, Record, ToolsRecord, UnreadRecord, record_kinds
from engine.schemas.reward import Posting
from engine.schemas.trajectory import Branch, Span, Trajectory
from engine.storable import MAX_SIZE, refusal, valid_text

_ARRAYS = ("output_ids", "logprobs", "routed_experts")
_BESIDE_ARRAYS = [field.name for field in fields(Generation) if field.name not in _ARRAYS]
_BESIDE_ROWS = [field.name for field in fields(Trajectory) if field.name not in ("branches", "postings")]
_SPAN = [field.name for field in fields(Span)]
_IMAGE_SPAN = ("start", "end", "image", "grid")
_POSTING = [field.name for field in fields(Posting)]
_IMAGE = "image"
"""The key that distinguishes an image from a span in the stored list of a branch."""
_EXPERTS = "experts"
"""The key of the number of tokens with known experts in the same list. The experts are in the journal alone; see `routing.py`."""
_beside_arrays, _beside_rows = attrgetter(*_BESIDE_ARRAYS), attrgetter(*_BESIDE_ROWS)
_span_columns, _image_columns, _posting_columns = attrgetter(*_SPAN), attrgetter(*_IMAGE_SPAN), attrgetter(*_POSTING)


def _swapped_bytes(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


array_bytes: Callable[[np.ndarray], bytes] = _swapped_bytes if sys.byteorder == "big" else methodcaller("tobytes")
"""Convert a 4-byte array of any shape to little-endian bytes, in C order."""


def array_from(data: bytes, dtype: type[np.int32] | type[np.float32]) -> np.ndarray:
    """Convert little-endian bytes to a new, writable array [n] in the machine's byte order."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(data, dtype=little).astype(dtype)


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not know, but that has a JSON form, such as a NumPy number in facts."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
"""Much faster than Pydantic's with structs. It writes other bytes for NaN, infinities and floats from 1e16, so values of code outside the
engine are compared, or left to Pydantic."""


def json_of(value: Any) -> str:
    """Return a plain value, a contract or a struct as JSON; NaN and infinities are kept.

    Raises:
        SpecCodeError: it holds something that JSON cannot say. Only code outside the engine can put that there.
    """
    try:
        return to_json(value, inf_nan_mode="constants", fallback=_plain).decode()
    except PydanticSerializationError as error:
        raise _unsayable(valid_text(str(error), 1000)) from error


def _unsayable(problem: str) -> SpecCodeError:
    return SpecCodeError(
        f"the answer cannot be stored: {problem}. Facts, results and task fields must be JSON: "
        "null, booleans, finite numbers, strings, lists and dicts of these",
        blame="environment",
        kind="not_json",
    )


class EncodedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A journal record in columns."""

    kind: str
    payload: str
    """The JSON of the record, without the arrays of a generation. `routed_experts` is the shape of its experts and their bytes each."""
    tokens: bytes | None = None
    """For a generation: int32 ids, then as many float32 log-probs, then the experts, if there are any."""
    size: int
    """Approximate size of payload and tokens in memory, in bytes."""
    record: Record
    """The record as it will be read back. The episode continues with this one, so that a replay gives the same result."""


def encode_record(record: Record) -> EncodedRecord:
    """Convert a journal record to columns.

    Raises:
        SpecCodeError: it holds a value that `engine.storable` refuses; the blame is on the part that returned it.
    """
    try:
        if type(record) is GenerationRecord:
            return _encode_generation(record)
        answers = record.answers()
        if answers is not None:
            problem = next(filter(None, (refusal({place: answer}) for place, answer in answers.items())), None)
            if problem is not None:
                raise _unsayable(problem)
        if type(record) is ToolsRecord and answers is None:
            text = _encoder.encode(record).decode()
        else:
            text = json_of(record.data if type(record) is UnreadRecord else record)
        if len(text) > 4 * MAX_SIZE:
            raise _unsayable(f"it has {len(text):,} characters as JSON; {4 * MAX_SIZE:,} are allowed")
        again = record if answers is None else type(record).read_json(text)
        return EncodedRecord(kind=record.kind, payload=text, size=len(text), record=again)
    except SpecCodeError as error:
        error.blame = record.blame
        raise
    except (
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # an answer of an environment, tool or user that was built without validation
        fault = _unsayable(valid_text(str(error), 1000))
        fault.blame = record.blame
        raise fault from error


def _encode_generation(record: GenerationRecord) -> EncodedRecord:
    generation = record.generation
    tokens = array_bytes(generation.output_ids) + array_bytes(generation.logprobs)
    beside = dict(zip(_BESIDE_ARRAYS, _beside_arrays(generation), strict=True))
    if generation.routed_experts is not None:
        packed = pack_experts(generation.routed_experts)
        tokens, beside["routed_experts"] = tokens + packed["data"], [*packed["shape"], packed["dtype"]]
    columns: dict[str, Any] = {"kind": "generation", "generation": beside}
    if record.whole:
        columns["whole"] = True
    text = _encoder.encode(columns).decode() if generation.text is None else json_of(columns)
    return EncodedRecord(kind="generation", payload=text, tokens=tokens, size=len(text) + len(tokens), record=record)


def entry_row(entry: JournalEntry, encoded: EncodedRecord | None = None) -> tuple[Any, ...]:
    """Convert a journal entry to columns (seq, state, event, dest, kind, payload, tokens, at, seconds).

    Args:
        entry: The entry.
        encoded: Its record, if it is encoded already.
    """
    encoded = encoded or encode_record(entry.record)
    columns = encoded.kind, encoded.payload, encoded.tokens
    return entry.seq, entry.state, entry.event, entry.dest, *columns, entry.at, entry.seconds


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Convert errors on reading a stored record into `StoreError` with the record's name."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # JSON, contracts, arrays
        lines = valid_text(str(error)).splitlines() or [type(error).__name__]
        raise StoreError(f"{what} is damaged ({' '.join(lines[:3])[:200]})") from error


def read_entry(row: Sequence[Any]) -> JournalEntry:
    """Convert columns (seq, state, event, dest, kind, payload, tokens, at, seconds) to a journal entry.

    Raises:
        StoreError: the columns do not hold an entry.
    """
    seq, state, event, dest, kind, payload, tokens, at, seconds = row
    with damaged(f"journal entry {seq} (`{kind}`)"):
        record = from_json(payload)
        if record["kind"] != kind:
            raise ValueError(f"its payload is of kind {record['kind']!r}")
        if kind == "generation":
            generation, end = record["generation"], len(tokens)
            if (form := generation.get("routed_experts")) is not None:
                *shape, dtype = form
                end -= prod(shape) * np.dtype(dtype).itemsize
                generation["routed_experts"] = {"shape": shape, "dtype": dtype, "data": tokens[end:]}
            generation["output_ids"] = array_from(tokens[: end // 2], np.int32)
            generation["logprobs"] = array_from(tokens[end // 2 : end], np.float32)
        if kind not in record_kinds():
            unread = UnreadRecord(kind=kind, data=record)
            return JournalEntry(seq=seq, state=state, event=event, dest=dest, record=unread, at=at, seconds=seconds)
        columns = {"seq": seq, "state": state, "event": event, "dest": dest, "record": record}
        return JournalEntry.read(columns | {"at": at, "seconds": seconds})


class EncodedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a trajectory, without the episode's number."""

    trajectory: str
    branches: list[tuple[Any, ...]]
    """(branch, reason, tokens, spans, input_ids, logprobs, weight_versions)"""
    postings: list[tuple[Any, ...]]
    """(seq, turn, name, delta, after, at_turn, op, cause, source)"""

    @property
    def size(self) -> int:
        """Its approximate size in memory, in bytes."""
        return len(self.trajectory) + sum(12 * int(branch[2]) for branch in self.branches)


def encode_trajectory(trajectory: Trajectory) -> EncodedTrajectory:
    """Convert a trajectory to rows.

    Raises:
        StoreError: the arrays of a branch do not match its spans.
    """
    return EncodedTrajectory(
        trajectory=_trajectory_json(trajectory),
        branches=[_write_branch(branch, trajectory.episode_id) for branch in trajectory.branches],
        postings=[*map(_posting_columns, trajectory.postings)],
    )


def _trajectory_json(trajectory: Trajectory) -> str:
    """What `json_of` writes, in a tenth of the time where msgspec writes all floats and values of code outside the engine as Pydantic does."""
    columns = dict(zip(_BESIDE_ROWS, _beside_rows(trajectory), strict=True))
    outcome, turns, messages = trajectory.outcome, trajectory.turns, trajectory.messages
    outside = [
        (trajectory.facts, trajectory.seconds),
        (outcome.reward, outcome.rewards),
        [(turn.rewards, turn.cost, turn.seconds, turn.queue_seconds) for turn in turns],
        [message.signed for message in messages],
        [call.arguments for message in messages for call in message.tool_calls],
    ]
    with suppress(ValueError, TypeError, OverflowError, RecursionError):  # `json_of` says what is wrong
        if _encoder.encode(outside) == to_json(outside, inf_nan_mode="constants", fallback=_plain):
            return _encoder.encode(columns).decode()
    return json_of(columns)


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
    images = [(_IMAGE, *_image_columns(image)) for image in branch.images]
    routed = [] if branch.routed_experts is None else [(_EXPERTS, len(branch.routed_experts))]
    spans = to_json([*map(_span_columns, branch.spans), *images, *routed]).decode()
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


def routed_tokens(row: Sequence[Any]) -> int | None:
    """How many tokens of a branch have known experts, from the columns of `read_branch`; None if they were not requested.

    Raises:
        StoreError: the columns do not hold a branch.
    """
    with damaged(f"branch {row[0]}"):
        return next((int(part[1]) for part in from_json(row[3]) if part[0] == _EXPERTS), None)


def read_branch(row: Sequence[Any]) -> Branch:
    """Convert columns (branch, reason, tokens, spans, input_ids, logprobs, weight_versions) to a branch without its experts.

    Raises:
        StoreError: the columns do not hold a branch.
    """
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
    """Convert columns (seq, turn, name, delta, after, at_turn, op, cause, source, start, end, call) to a posting.

    Raises:
        StoreError: the columns do not hold a posting.
    """
    with damaged(f"posting {row[0]}"):
        return Posting.read(dict(zip(_POSTING, row, strict=True)))


def read_trajectory(text: str, branches: list[Branch], postings: list[Posting]) -> Trajectory:
    """Build a trajectory from its JSON and its rows.

    Raises:
        StoreError: the JSON does not hold a trajectory.
    """
    with damaged("the trajectory"):
        plain = Trajectory.read(from_json(text) | {"branches": []})
        return replace(plain, branches=branches, postings=postings)
