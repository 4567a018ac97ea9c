"""Contracts out of values that the engine made itself: built as they are, not validated once more.

Invariant: `maker(C)(**values)` equals `C(**values)` for every call in the engine; `checked` holds tests to it. What
comes from outside (a world, a file, a server, a spec) never comes this way: it is validated where it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

C = TypeVar("C", bound=BaseModel)

_put = object.__setattr__
_checking = False


def maker(contract: type[C]) -> Callable[..., C]:
    """A function that builds a contract, from every field that has no default and any of the others, in their order."""
    fields = contract.model_fields
    names = set(fields)
    count = len(names)
    plain = {name: None if field.is_required() else field.get_default() for name, field in fields.items()}
    factories = [(name, field.default_factory) for name, field in fields.items() if field.default_factory is not None]
    new: Callable[[type[C]], C] = contract.__new__

    def complete(values: dict[str, Any]) -> dict[str, Any]:
        if _checking:
            _check(contract, values)
        if len(values) == count:
            return values
        return plain | {name: factory() for name, factory in factories} | values  # type: ignore[call-arg]

    def make(**values: Any) -> C:
        made = new(contract)
        _put(made, "__dict__", complete(values) if _checking or len(values) != count else values)
        _put(made, "__pydantic_fields_set__", names)
        _put(made, "__pydantic_extra__", None)
        _put(made, "__pydantic_private__", None)
        return made

    return make


def row_maker(contract: type[C]) -> Callable[[Iterable[dict[str, Any]]], list[C]]:
    """`maker` for many at once, each from a dict of every field in their order."""
    names = set(contract.model_fields)
    new: Callable[[type[C]], C] = contract.__new__

    def make(rows: Iterable[dict[str, Any]]) -> list[C]:
        put, found = _put, []
        for values in rows:
            if _checking:
                _check(contract, values)
            made = new(contract)
            put(made, "__dict__", values)
            put(made, "__pydantic_fields_set__", names)
            put(made, "__pydantic_extra__", None)
            put(made, "__pydantic_private__", None)
            found.append(made)
        return found

    return make


def _check(contract: type[BaseModel], values: dict[str, Any]) -> None:
    """Raise where validation would refuse the values, or change one."""
    valid = contract(**values)
    if list(values) != [name for name in contract.model_fields if name in values]:
        raise AssertionError(f"{contract.__name__}: {list(values)} are not in the order of its fields")
    changed = [
        name
        for name, value in values.items()
        if type(getattr(valid, name)) is not type(value) or not _same(valid, name, value)
    ]
    if changed:
        raise AssertionError(f"{contract.__name__}: validation changes {changed} of {values!r}")


def _same(valid: BaseModel, name: str, value: Any) -> bool:
    found = getattr(valid, name)
    return bool((found == value) if not hasattr(value, "dtype") else (found.dtype == value.dtype and found is value))


@contextmanager
def checked() -> Iterator[None]:
    """Hold every contract that is made to what validation makes of its values. For tests."""
    global _checking
    before, _checking = _checking, True
    try:
        yield
    finally:
        _checking = before
