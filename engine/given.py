"""Objects that a program gives to a spec, where a spec names code: `environment: {use: "engine.given:Guess"}`.

A class or function of an importable module is named by its own entry point. What only this process has, such as a class
of a notebook's cell, gets a name here, as an attribute of this module.

Invariant: a name stands for one object as long as the process runs; in another process it is refused with what to do.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

_objects: dict[str, Any] = {}
"""Name -> what the engine calls: a class, a function, or what copies an object for each episode."""
_sources: dict[str, Any] = {}
"""Name -> what was given."""


def use_of(value: Any) -> str:
    """The entry point of a class, function or object.

    An object that cannot be called is copied (`copy.deepcopy`) for each episode, because episodes never share state.
    One that can be called is a tool, and is used as it is.
    """
    qualified = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if qualified and module and module != "__main__":
        imported: Any = sys.modules.get(module)
        for part in qualified.split("."):
            imported = getattr(imported, part, None)
        if imported is value:
            return f"{module}:{qualified}"
    earlier = next((name for name, source in _sources.items() if source is value), None)
    if earlier is not None:
        return f"{__name__}:{earlier}"
    short = (qualified or type(value).__qualname__).rpartition(".")[2].strip("<>")
    names = (f"{short}_{number}" if number > 1 else short for number in count(1))
    name = next(name for name in names if name not in _sources)
    _sources[name] = value
    _objects[name] = value if callable(value) else _copying(value)
    return f"{__name__}:{name}"


def is_given(use: str) -> bool:
    """Whether an entry point stands for an object that only one process has."""
    return use.partition(":")[0] == __name__


def names_in(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The given objects that a spec's document names, with their places."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from names_in(value, (*path, key))
    elif isinstance(document, str) and is_given(document):
        yield path, document.partition(":")[2]


def gone(document: Any, *, stored: bool = False) -> Iterator[str]:
    """Why each object that a spec's document names is not in this process, with what to do; of a stored run, why no
    process can go on with it, also the one that has it."""
    return (_gone(name) for _, name in names_in(document) if stored or name not in _objects)


def _gone(name: str) -> str:
    whose = "belongs to this process alone" if name in _objects else "was given by another process, which alone has it"
    return f"the object `{name}` {whose}; put it into a module beside the spec and write `module:{name}`"


def _copying(value: Any) -> Callable[[], Any]:
    def make() -> Any:
        return copy.deepcopy(value)

    if hasattr(value, "events"):
        make.events = value.events  # type: ignore[attr-defined]  # what its steps may answer
    return make


def __getattr__(name: str) -> Any:
    if name in _objects:
        return _objects[name]
    raise AttributeError(_gone(name))
