"""The library that runs CEL, without its command line.

Invariant: it is the very module that `import cel` offers, under its own name. The package's `__init__` also imports a
command line, which costs more time than everything else that is read when a spec is checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def cel_module() -> ModuleType:
    """The compiled extension `cel.cel`; the whole package, where it is laid out in another way."""
    known = sys.modules.get("cel.cel")
    if known is not None:
        return known
    package = importlib.util.find_spec("cel")
    places = package.submodule_search_locations if package is not None else None
    found = PathFinder.find_spec("cel.cel", places) if places is not None else None
    if found is None or found.loader is None:
        return importlib.import_module("cel")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if not callable(getattr(module, "compile", None)):
        return importlib.import_module("cel")
    sys.modules["cel.cel"] = module  # so that a later `import cel` takes it, rather than begin it twice
    return module
