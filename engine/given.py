"""Objects that a program gives to a spec where the spec names code: `environment: {use: "engine.given:Guess"}`.

A class or function of an importable module is named by its own entry point. What only this process has, such as a class
of a notebook's cell, gets a name here.

Invariant: a name stands for one object as long as the process runs; in another process it is refused with what to do.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

_objects: dict[str, Any] = {}
"""Name -> what the engine calls: a class, a function, or what copies an object for each episode."""
_sources: dict[str, Any] = {}
"""Name -> what was given."""


def entry_of(value: Any) -> str:
    """The entry point of a class, function or object.

    An object that is no function or class is copied (`copy.deepcopy`) for each episode, because an episode never shares
    state with another one. A callable object is used as it is: it is a tool.
    """
    named = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if named and module and module != "__main__" and _imported(module, named) is value:
        return f"{module}:{named}"
    short = (named or type(value).__qualname__).rpartition(".")[2].strip("<>")
    for name, source in _sources.items():
        if source is value:
            return f"{__name__}:{name}"
    name = next(name for name in _names(short) if name not in _sources)
    _sources[name] = value
    _objects[name] = value if callable(value) else _copies(value)
    return f"{__name__}:{name}"


def is_given(use: str) -> bool:
    """Whether an entry point stands for an object that only one process has."""
    return use.partition(":")[0] == __name__


def _names(short: str) -> Any:
    yield short
    number = 2
    while True:
        yield f"{short}_{number}"
        number += 1


def _copies(value: Any) -> Callable[[], Any]:
    def make() -> Any:
        return copy.deepcopy(value)

    make.__name__ = type(value).__name__
    return make


def _imported(module: str, named: str) -> Any:
    target: Any = sys.modules.get(module)
    for part in named.split("."):
        target = getattr(target, part, None)
    return target


def __getattr__(name: str) -> Any:
    if name in _objects:
        return _objects[name]
    raise AttributeError(
        f"the spec was given the object `{name}` by a program that has ended or is another one; to use it here, put it "
        f"in a module beside the spec and write `use: module:{name}`"
    )
