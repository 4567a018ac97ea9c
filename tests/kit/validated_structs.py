"""Hold every struct that is built to what validation makes of its values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from engine import plugin
from engine.schemas import generation, journal, message, reward, trajectory
from engine.schemas.base import Struct

STRUCTS: list[type[Struct]] = list(
    dict.fromkeys(
        value
        for values in (*map(vars, (generation, journal, message, reward, trajectory)), plugin.loaded("records"))
        for value in values.values()
        if isinstance(value, type) and issubclass(value, Struct) and hasattr(value, "__dataclass_fields__")
    )
)
"""Every class of structs."""


@contextmanager
def structs_validated() -> Iterator[None]:
    """Raise where the engine builds a struct that validation would refuse, or of which it would change a value."""
    with pytest.MonkeyPatch.context() as patch:
        for struct in STRUCTS:
            patch.setattr(struct, "__init__", _checking(struct.__init__))
        yield


def _checking(build: Any) -> Any:
    def init(self: Any, **values: Any) -> None:
        build(self, **values)
        check(self)

    return init


def check(built: Struct) -> None:
    """Raise AssertionError where validation changes a value, and ValidationError where it refuses one."""
    valid = type(built).read(built)
    changed = [
        field.name for field in fields(built) if not same(getattr(valid, field.name), getattr(built, field.name))
    ]  # type: ignore[arg-type]
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
            same(getattr(valid, field.name), getattr(value, field.name))
            for field in fields(value)  # type: ignore[arg-type]
        )
    return type(valid) is type(value) and bool(valid == value)
