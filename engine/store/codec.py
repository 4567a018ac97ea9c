"""Journal records <-> database columns, bit for bit, and the JSON and arrays of all columns.

Invariant: what is read equals what was written: token arrays are stored as raw little-endian bytes (with NaN payloads
and infinities), floats in JSON with the fewest digits that give the same float.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
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
from engine.schemas.message import ToolResult
from engine.storable import MAX_SIZE, refusal, valid_text

_ARRAYS = ("output_ids", "logprobs", "routed_experts")
_BESIDE_ARRAYS = [field.name for field in fields(Generation) if field.name not in _ARRAYS]
_beside_arrays = attrgetter(*_BESIDE_ARRAYS)


def _swapped_bytes(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


array_bytes: Callable[[np.ndarray], bytes] = _swapped_bytes if sys.byteorder == "big" else methodcaller("tobytes")
"""Convert a 4-byte array of any shape to little-endian bytes, in C order."""


def array_from(data: bytes, dtype: type[np.int32] | type[np.float32]) -> np.ndarray:
    """Convert little-endian bytes to a new, writable array [n] in the machine's byte order."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(data, dtype=little).astype(dtype)


def plain_of(value: Any) -> Any:
    """Convert a value that JSON does not know, but that has a JSON form, such as a NumPy number in facts."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON")


ENCODER = msgspec.json.Encoder(enc_hook=plain_of)
"""Much faster than Pydantic's with structs. It writes other bytes for NaN, infinities and floats from 1e16, so values
of code outside the engine are compared, or left to Pydantic."""


def json_of(value: Any) -> str:
    """Return a plain value, a contract or a struct as JSON; NaN and infinities are kept.

    Raises:
        SpecCodeError: it holds something that JSON cannot say. Only code outside the engine can put that there.
    """
    try:
        return to_json(value, inf_nan_mode="constants", fallback=plain_of).decode()
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
    """The JSON of the record, without the arrays of a generation. `routed_experts` is the shape of its experts and
    their bytes each."""
    tokens: bytes | None = None
    """For a generation: int32 ids, then as many float32 log-probs, then the experts, if there are any."""
    size: int
    """Approximate size of payload and tokens in memory, in bytes."""
    record: Record
    """The record as it will be read back. The episode continues with this one, so that a replay gives the same
    result."""


def encode_record(record: Record) -> EncodedRecord:
    """Convert a journal record to columns.

    Raises:
        SpecCodeError: it holds a value that `engine.storable` refuses; the blame is on the part that returned it.
    """
    again: Record
    try:
        if type(record) is GenerationRecord:
            return _encode_generation(record)
        if type(record) is ToolsRecord and are_texts(record.results):
            text, again = ENCODER.encode(record).decode(), record
        else:
            answers = record.answers()
            problem = next(filter(None, (refusal({place: answer}) for place, answer in (answers or {}).items())), None)
            if problem is not None:
                raise _unsayable(problem)
            text = json_of(record.data if type(record) is UnreadRecord else record)
            again = record if answers is None else type(record).read_json(text)
        if len(text) > 4 * MAX_SIZE:
            raise _unsayable(f"it has {len(text):,} characters as JSON; {4 * MAX_SIZE:,} are allowed")
        return EncodedRecord(kind=record.kind, payload=text, size=len(text), record=again)
    except SpecCodeError as error:
        error.blame = record.blame
        raise
    except (
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # an answer of the spec's code that was built without validation
        fault = _unsayable(valid_text(str(error), 1000))
        fault.blame = record.blame
        raise fault from error


def are_texts(results: Sequence[ToolResult]) -> bool:
    """Whether results hold no value of any form, as most do."""
    for result in results:  # noqa: SIM110  (a generator is a frame more, each turn)
        if type(result.content) is not str or result.rewards or result.facts:
            return False
    return True


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
    text = ENCODER.encode(columns).decode() if generation.text is None else json_of(columns)
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
