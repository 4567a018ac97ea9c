"""Where the import system would find a module. Nothing is imported."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from engine.spec.access import Access
from engine.spec.entry import EntryError, OwnModules, import_path, no_module


class ModuleFiles:
    """Finds the files of modules for one spec, each once while the import path and its finders stay as they are.

    Args:
        base: The spec's folder.
        access: Which files may be read; files on the import path may, too.
    """

    def __init__(self, base: Path | None, access: Access) -> None:
        self._base = base
        self._access = access
        self._state: tuple[list[str], list[Any]] = ([], [])
        """The import path and the finders that the answers are for."""
        self._search: list[str] = []
        self._readable: Access | None = None
        """The access with the folders of the import path, once a module needs it."""
        self._own = OwnModules(None if base is None else str(base.resolve()))
        self._found: dict[tuple[str, str], Path | str | None] = {}
        """The file of each module, None, or the message of the error."""

    def find(self, module: str, use: str) -> Path | None:
        """The module's file; None where it has none that may be read as text.

        Args:
            module: The name of the module.
            use: The entry point that names it, for the message.

        Raises:
            EntryError: there is no such module.
        """
        if (sys.path, sys.meta_path) != self._state:
            self._state = ([*sys.path], [*sys.meta_path])
            self._search = import_path(self._base)
            self._readable = None
            self._found.clear()
        key = (module, use)
        if key not in self._found:
            try:
                self._found[key] = self._find(module, use)
            except EntryError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise EntryError(found)
        return found

    def _find(self, module: str, use: str) -> Path | None:
        path: list[str] | None = None
        spec: ModuleSpec | None = None
        own = True
        parts = module.split(".")
        for index in range(len(parts)):
            name = ".".join(parts[: index + 1])
            if index and path is None:
                raise EntryError(no_module(name, use, self._search, None))
            spec, own = self._spec_of(name, path)
            if spec is None:
                raise EntryError(no_module(name, use, self._search, path))
            path = _places(spec)
        if spec is None:
            return None
        origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
        if origin is None or not str(origin).endswith(".py"):
            return None
        file = Path(origin)
        if self._access.is_file(file):
            return file
        if not own:
            return file if self._with([file.parent]).is_file(file) else None
        if self._readable is None:
            self._readable = self._with(self._search)
        return file if self._readable.is_file(file) else None

    def _with(self, trusted: Iterable[str | Path]) -> Access:
        """The access with these folders too, except the root of the file system."""
        if self._access.roots is None:
            return self._access
        folders = [Path(folder).resolve() for folder in trusted if folder]
        return self._access.below(*(folder for folder in folders if folder != folder.parent))

    def _spec_of(self, name: str, path: list[str] | None) -> tuple[ModuleSpec | None, bool]:
        """What the finders say of a module, and whether it was found on the import path. Finders import nothing."""
        beside = self._own.find_spec(name, path)
        if beside is not None:
            return beside, True
        for finder in sys.meta_path:
            if isinstance(finder, OwnModules):  # of a spec that was imported before
                continue
            own = finder is PathFinder
            try:
                places = self._search if own and path is None else path
                spec = finder.find_spec(name, places)
            except Exception:  # noqa: BLE001  (a finder that somebody installed)
                continue
            if spec is not None:
                return spec, own
        return None, True


def _places(spec: ModuleSpec) -> list[str] | None:
    """Where a package's modules are; None for a module. A namespace's own list would be looked up by its parent."""
    places: Any = spec.submodule_search_locations
    return None if places is None else list(getattr(places, "_path", places))


def has_submodule(folder: Path, name: str) -> bool:
    """Whether a package's folder has a module of this name."""
    return any(info.name == name for info in pkgutil.iter_modules([str(folder)])) or (folder / name).is_dir()
