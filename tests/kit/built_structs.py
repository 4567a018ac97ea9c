"""A hook that is called with each struct that is built. It must be imported before the first subclass of `Struct` is made.

msgspec never calls a struct's `__init__`, and it looks for `__post_init__` once, when the class is made.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.schemas.base import Struct

OBSERVERS: list[Callable[[Struct], None]] = []
"""They are called in the thread that builds the struct, before it has it."""


def _observe(built: Struct) -> None:
    for observer in OBSERVERS:
        observer(built)


assert not Struct.__subclasses__(), "a subclass of Struct was made before the hook"
Struct.__post_init__ = _observe  # type: ignore[attr-defined]
