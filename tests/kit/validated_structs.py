"""Hold every struct that is built to what validation makes of its values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from built_structs import OBSERVERS

from engine import plugin
from engine.schemas import generation, journal, message, reward, trajectory
from engine.schemas.base import Struct

STRUCTS: list[type[Struct]] = list(
    dict.fromkeys(
        value
        for values in (*map(vars, (generation, journal, message, reward, trajectory)), plugin.loaded("records"))
        for value in values.values()
        if isinstance(value, type) and issubclass(value, Struct) and value not in (Struct, journal.RecordBase)
    )
)
"""Every class of structs."""


_VALIDATING = threading.local()


@contextmanager
def structs_validated() -> Iterator[None]:
    """Raise where the engine builds a struct that validation would refuse, or of which it would change a value."""
    OBSERVERS.append(_check_once)
    try:
        yield
    finally:
        OBSERVERS.remove(_check_once)


def _check_once(built: Struct) -> None:
    """Check a struct, but not those that its check builds."""
    if type(built) in STRUCTS and not getattr(_VALIDATING, "now", False):
        _VALIDATING.now = True
        try:
            check(built)
        finally:
            _VALIDATING.now = False


def check(built: Struct) -> None:
    """Raise AssertionError where validation changes a value, and ValidationError where it refuses one."""
    valid = type(built).read(built)
    changed = [
        field.name for field in fields(built) if not same(getattr(valid, field.name), getattr(built, field.name))
    ]
    if changed:
        raise AssertionError(f"validation changes {changed} of {built!r}")


def same(valid: Any, value: Any) -> bool:
    """Whether two values are of one type and equal, arrays bit for bit."""
    if hasattr(value, "dtype"):
        return bool(valid.dtype == value.dtype and valid.tobytes() == value.tobytes())
    if isinstance(value, list) and isinstance(valid, list):
        return len(valid) == len(value) and all(map(same, valid, value))
    if isinstance(value, Struct):
        return type(valid) is type(value) and all(
            same(getattr(valid, field.name), getattr(value, field.name)) for field in fields(value)
        )
    return type(valid) is type(value) and bool(valid == value)
