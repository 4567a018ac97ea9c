"""An incoming value -> whether it can be stored, read back, replayed and exported, and the first place where it cannot.

    refusal({"answer": 7})                  # None: storable
    refusal({"tree": [[float("nan")]]})     # "`tree[0][0]` is nan; JSON has finite numbers only"

It is applied where a value enters: to the arguments of a tool call (a refused call is malformed, an error of the
policy), to answers of environments, tools, users, scorers and judges (a refused answer is a failure of the code that
gave it), and to task rows.

A storable value is made of None, booleans, numbers, strings, lists and dicts. The limits and their reasons:

- integers have 64 bits with a sign: Arrow and Parquet have no larger ones, and Python reads no more than 4,300 digits;
- floats are finite: JSON has no NaN and no infinity;
- strings hold no lone surrogate: UTF-8 cannot encode one;
- keys are strings;
- lists and dicts are nested at most `MAX_DEPTH` deep: JSON readers stop between 128 and 1,000, and a record, a
  trajectory and a row add some levels around the value;
- a value has at most `MAX_SIZE` characters, where each number, list and dict counts as `ELEMENT`: Arrow addresses 2 GiB
  of text in a batch, and checking this many takes 0.2 s.

NumPy scalars and arrays, tuples and subclasses of the types above are checked by their content.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from math import isfinite
from typing import Any

import numpy as np

from engine.masking import mask_credentials

MAX_DEPTH = 64
"""Maximum nesting of lists and dicts."""
MAX_SIZE = 2**23
"""Maximum size: characters of all strings and keys, plus `ELEMENT` for each value."""
ELEMENT = 16
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
MAX_NAME = 256
"""Maximum length of a tool's name in a call, in characters."""
MAX_MESSAGE = 20_000
"""Maximum length of a stored error message or traceback, in characters."""


class _Refused(Exception):
    """The reason, and the keys and indices of the place, innermost first."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str | int] = []


def refusal(value: Any) -> str | None:
    """Say why a value cannot be stored: its place and the limit, in one sentence. None if it can be stored."""
    try:
        _size(value, MAX_DEPTH, MAX_SIZE)
    except _Refused as refused:
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(refused.path))
        if len(path) > 200:
            path = f"{path[:100]}…{path[-100:]}"
        place = valid_text(path.removeprefix("."))
        return f"`{place}` {refused.why}" if place else f"it {refused.why}"
    return None


def call_refusal(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Say, to the model, why a tool call cannot be stored. None if it can be stored."""
    if (problem := refusal(arguments)) is not None:
        return f"Its arguments cannot be used: {problem}."
    if len(name) > MAX_NAME or not (name.isascii() or refusal(name) is None):
        return f"Its name is not a text of at most {MAX_NAME} characters."
    return None


def stored_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A task's fields as stored: digests replace images in `data:` URIs, because the run store has their bytes."""
    return {key: _by_digest(value) for key, value in fields.items()}


def _by_digest(value: Any) -> Any:
    if isinstance(value, str):
        if not value.startswith("data:image/") or ";base64," not in value[:64]:
            return value
        try:
            return f"sha256:{sha256(b64decode(value.partition(',')[2], validate=True)).hexdigest()}"
        except binascii.Error:
            return value
    if isinstance(value, dict):
        return {key: _by_digest(item) for key, item in value.items()}
    return [_by_digest(item) for item in value] if isinstance(value, list) else value


def _size(value: Any, depth: int, room: int) -> int:
    """Size of a value in characters and elements; at most `room`, with at most `depth` levels of lists and dicts.

    Raises:
        _Refused: It cannot be stored.
    """
    kind = type(value)
    if kind is str:
        if not value.isascii() and not _encodes(value):
            raise _Refused("has half of a character (a lone surrogate), which UTF-8 cannot encode")
        if len(value) > room:
            raise _Refused(f"has more than {MAX_SIZE:,} characters, or the value that contains it")
        return len(value) + ELEMENT
    if kind is bool or value is None:
        return ELEMENT
    if kind is int:
        if not MIN_INTEGER <= value <= MAX_INTEGER:
            raise _Refused("is an integer of more than 64 bits; write it as a string")
        return ELEMENT
    if kind is float:
        if not isfinite(value):
            raise _Refused(f"is {value}; JSON has finite numbers only")
        return ELEMENT
    if kind is dict:
        return _size_of_dict(value, depth, room)
    if kind is list:
        return _size_of_list(value, depth, room)
    return _size_of_other(value, depth, room)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size_of_dict(value: Mapping[Any, Any], depth: int, room: int) -> int:
    if not depth:
        raise _Refused(f"is nested more than {MAX_DEPTH} deep")
    size = ELEMENT
    for key, item in value.items():
        if not isinstance(key, str):
            raise _Refused(f"has a key of type {type(key).__name__}; JSON has string keys only")
        if not key.isascii() and not _encodes(key):
            raise _Refused("has a key with half of a character (a lone surrogate)")
        try:
            if type(item) is str and item.isascii() and len(item) <= room - size:  # most are
                size += len(key) + len(item) + ELEMENT
            else:
                size += len(key) + _size(item, depth - 1, room - size)
        except _Refused as refused:
            refused.path.append(key)
            raise
        if size > room:
            raise _Refused(f"has more than {MAX_SIZE:,} characters")
    return size


def _size_of_list(value: list[Any] | tuple[Any, ...], depth: int, room: int) -> int:
    if not depth:
        raise _Refused(f"is nested more than {MAX_DEPTH} deep")
    size = ELEMENT
    for index, item in enumerate(value):
        try:
            size += _size(item, depth - 1, room - size)
        except _Refused as refused:
            refused.path.append(index)
            raise
        if size > room:
            raise _Refused(f"has more than {MAX_SIZE:,} characters")
    return size


def _size_of_other(value: Any, depth: int, room: int) -> int:
    """Size of NumPy values, tuples and subclasses of JSON's types."""
    if isinstance(value, np.ndarray) and value.size * ELEMENT > MAX_SIZE:
        raise _Refused(f"has {value.size:,} elements; {MAX_SIZE // ELEMENT:,} are allowed")
    if isinstance(value, np.generic | np.ndarray):
        held = value.tolist()
        if isinstance(held, np.generic):  # for example a long double
            raise _Refused(f"is of type {_name(value)}, which JSON cannot hold")
        return _size(held, depth, room)
    if isinstance(value, tuple):
        return _size_of_list(value, depth, room)
    for base in (str, int, float):
        if isinstance(value, base):
            return _size(base(value) if base is not str else str.__str__(value), depth, room)
    if isinstance(value, dict):
        return _size_of_dict(value, depth, room)
    if isinstance(value, list):
        return _size_of_list(value, depth, room)
    raise _Refused(f"is of type {_name(value)}, which JSON cannot hold")


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def valid_text(text: str, most: int = MAX_MESSAGE) -> str:
    """Text that can be stored: secrets are masked, lone surrogates are escaped, the middle of long text is left out.

    For error messages and tracebacks, which must be stored regardless of what they quote.
    """
    text = mask_credentials(text)
    if len(text) > most:
        text = f"{text[: most // 2]}\n… {len(text) - most:,} characters left out …\n{text[-(most // 2) :]}"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """The message of an exception of user code, whose `__str__` may itself fail."""
    try:
        return valid_text(str(error))
    except Exception as failed:  # noqa: BLE001  (for example a recursion error in the `repr` of a quoted value)
        return f"(its message cannot be read: {type(failed).__name__})"


def words_of(error: BaseException) -> str:
    """`Type: message` of an exception of user code."""
    return f"{type(error).__name__}: {message_of(error)}"
