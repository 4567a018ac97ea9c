"""Entry points: `package.module:Name` -> the thing itself.

Modules are looked for in the standard library first, then in the spec's folder, in the folder that the engine was
started in, and among what is installed. So a file beside the spec never replaces a module of Python's own, and two
specs in two folders each get their own module where both have one of the same name.

A command that only looks at a run, which a stranger may have made, imports nothing that the run names (`looking`).

A package offers its parts by entry points of `GROUPS`, so a spec may have `environment: {use: vault}` instead of
`use: "my_package.vault:Vault"`. Such a short name is replaced when a spec is read, so a stored run has the entry point.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from engine import plugin
from engine.errors import EngineError
from engine.given import is_given
from engine.moved_names import current
from engine.schemas.entry import installed_points
from engine.spec.access import Access
from engine.spec.text.diagnostic import DataPath

_INSTALLED = ("site-packages", "dist-packages")
_ADDED: set[str] = set()
"""Folders that were put on the import path here."""
_named: dict[str, bool] | None = None
"""While a command looks at a run: the entry points that may be imported, and whether they were; None: all may."""


class EntryError(EngineError):
    """An entry point that cannot be had; the message says what failed and names what is near."""

    kind = "entry_error"
    blame = "spec"


def load_entry(use: str, base: Path | None) -> Any:
    """Import what `use` names.

    Args:
        use: `package.module:Name`; the name may be dotted (`Class.method`).
        base: The spec's folder, which is put on the import path, as is the current folder.

    Raises:
        EntryError: it is not of that form, the module cannot be imported, or it has no such name; or a command only
            looks at a run, and its user did not name it.
    """
    module_name, parts = parse_entry(use)
    if _named is not None:
        if use not in _named:
            raise EntryError(
                f"the run names the code `{use}`, and looking at a run imports none: it would be "
                f"{_place(module_name, use, base)}. "
                f"If you trust it: --import {use}"
            )
        _named[use] = True
    search, folders = _with_folders(base)
    if search != sys.path:
        sys.path[:] = search
        _ADDED.update(folders)
        importlib.invalidate_caches()
    _own_modules_first(base)
    target = _import(module_name, use)
    for index, part in enumerate(parts):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            if is_given(use):
                raise EntryError(str(error)) from None
            owner = ".".join([module_name, *parts[:index]])
            raise EntryError(f"`{owner}` has no `{part}`{nearest_attribute(part, dir(target))}") from None
        except Exception as error:  # a module may load its parts lazily, and that may fail
            raise EntryError(f"`{part}` of `{module_name}` failed{raised_at(error)}: {_words(error)}") from error
    return target


@contextmanager
def looking(named: Sequence[str] | None = ()) -> Iterator[dict[str, bool]]:
    """Inside the block, import no code that a run names, and nothing from the current folder.

    Args:
        named: Entry points that may be imported; None: all again. The block gets them, and whether each was imported.
    """
    global _named
    before, path, here = _named, [*sys.path], str(Path.cwd())
    _named = None if named is None else dict.fromkeys(named, False)
    if named is not None and not here.endswith(_INSTALLED) and here != str(Path(os.__file__).parent):
        sys.path[:] = [entry for entry in path if entry not in ("", here)]
    try:
        yield _named or {}
    finally:
        _named = before
        sys.path[:] = path


def is_looking() -> bool:
    """Whether a command only looks at a run."""
    return _named is not None


def _place(module: str, use: str, base: Path | None) -> str:
    """Where a module would be imported from, in words. Nothing is imported."""
    try:
        file = ModuleFiles(base, Access()).find(module, use)
    except EntryError:
        return "nothing, because there is no such module here"
    return str(file or f"the module `{module}`, which has no text")


def parse_entry(use: str) -> tuple[str, list[str]]:
    """`package.module:Class.method` -> the module, and the names of the attribute. An old name of the engine's is read
    as the new one.

    Raises:
        EntryError: it is not of that form.
    """
    module, colon, attribute = current(use).partition(":")
    if (why := plugin.missing_module(module)) is not None:
        raise EntryError(f"`{use}`: {why}")
    parts = attribute.split(".")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *parts]):
        raise EntryError(f"`{use}` is no entry point; write `package.module:Name`")
    return module, parts


def _with_folders(base: Path | None) -> tuple[list[str], list[str]]:
    """The import path with the spec's folder and the current one before what is installed, behind the standard library;
    and the folders that it has beside those of `sys.path`."""
    folders = list(dict.fromkeys(str(folder.resolve()) for folder in (base, Path()) if folder is not None))
    folders = [folder for folder in folders if folder in _ADDED or folder not in sys.path]
    paths = [entry for entry in sys.path if entry not in folders]
    at = next((i for i, entry in enumerate(paths) if entry in _ADDED or entry.endswith(_INSTALLED)), len(paths))
    return [*paths[:at], *folders, *paths[at:]], folders


class OwnModules:
    """Finds the modules of the spec's own folder before others of their name, wherever those are on the import path."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """As the import system asks: only for modules that are inside of no package."""
        if path is not None or self.folder is None or name in sys.stdlib_module_names or name == _OURS:
            return None
        module_spec = PathFinder.find_spec(name, [self.folder])
        if module_spec is None or module_spec.origin is None:  # a bare folder may be anything
            return None
        return module_spec


_OURS = __name__.partition(".")[0]
_OWN = OwnModules()


def _own_modules_first(base: Path | None) -> None:
    """Have imports look into this spec's folder first, and drop modules of other folders that have their name there."""
    if base is None:
        return
    if _OWN not in sys.meta_path:
        sys.meta_path.insert(0, _OWN)
    spec_folder = str(base.resolve())
    if _OWN.folder == spec_folder:
        return
    _OWN.folder = spec_folder
    here = {info.name for info in pkgutil.iter_modules([spec_folder])} - sys.stdlib_module_names - {_OURS}
    for name in here & set(sys.modules):
        file = getattr(sys.modules[name], "__file__", None)
        place = Path(file).resolve() if file else None
        folder = None if place is None else place.parent.parent if place.stem == "__init__" else place.parent
        if folder is None or (str(folder) != spec_folder and not str(folder).endswith(_INSTALLED)):
            for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
                del sys.modules[module]


def _import(module_name: str, use: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            parent = missing.rpartition(".")[0]
            places = getattr(sys.modules.get(parent), "__path__", None) if parent else None
            raise EntryError(_no_module(missing, use, sys.path, places)) from None
        raise EntryError(f"`{module_name}` needs the module `{missing}`, which is not installed") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module of the user's own raises, SystemExit too
        raise EntryError(f"importing `{module_name}` failed{raised_at(error)}: {_words(error)}") from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def raised_at(error: BaseException) -> str:
    """The innermost file and line of a traceback that is not the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<frozen") and name not in (__file__, importlib.__file__):
            place = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class ModuleFiles:
    """Finds the files of modules for one spec, each once while the import path and its finders stay as they are. Files
    on the import path may be read, whatever `access` says.
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
        """The module's file; None where it has none that may be read as text. Raises: EntryError: `use` names a module
        that is not there."""
        if (sys.path, sys.meta_path) != self._state:
            self._state = ([*sys.path], [*sys.meta_path])
            self._search = _with_folders(self._base)[0]
            self._readable = None
            self._found.clear()
        key = (module, use)
        if key not in self._found:
            try:
                self._found[key] = self._find(module, use)
            except EntryError as error:
                self._found[key] = str(error)
        cached = self._found[key]
        if isinstance(cached, str):
            raise EntryError(cached)
        return cached

    def _find(self, module: str, use: str) -> Path | None:
        path: list[str] | None = None
        spec: ModuleSpec | None = None
        by_path = True
        parts = module.split(".")
        for index in range(len(parts)):
            name = ".".join(parts[: index + 1])
            if index and path is None:
                raise EntryError(_no_module(name, use, self._search, None))
            spec, by_path = self._spec_of(name, path)
            if spec is None:
                raise EntryError(_no_module(name, use, self._search, path))
            places: Any = spec.submodule_search_locations  # None for a module
            path = None if places is None else list(getattr(places, "_path", places))  # else its parent would be asked
        if spec is None:
            return None
        origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
        if origin is None or not str(origin).endswith(".py"):
            return None
        file = Path(origin)
        if self._access.is_file(file):
            return file
        if not by_path:
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
            by_path = finder is PathFinder
            try:
                places = self._search if by_path and path is None else path
                spec = finder.find_spec(name, places)
            except Exception:  # noqa: BLE001  (a finder that somebody installed)
                continue
            if spec is not None:
                return spec, by_path
        return None, True


def has_submodule(folder: Path, name: str) -> bool:
    """Whether a package's folder has a module of this name."""
    return any(info.name == name for info in pkgutil.iter_modules([str(folder)])) or (folder / name).is_dir()


def _no_module(missing: str, use: str, path: Sequence[str], places: Sequence[str] | None) -> str:
    """What is said of the module `missing` of an entry point that is not there. It was looked for in `path`, its
    package in `places`."""
    parent, _, leaf = missing.rpartition(".")
    if not parent:
        names = _modules(tuple(path))
        return f"`{use}`: there is no module `{missing}`{nearest_attribute(missing, names, list_all=False)}"
    if places is None:
        return f"`{use}`: `{parent}` is a module, not a package, so it has no `{leaf}`; write `{parent}:Name`"
    names = [info.name for info in pkgutil.iter_modules(places)]
    return f"`{use}`: the package `{parent}` has no module `{leaf}`{nearest_attribute(leaf, names)}"


@lru_cache(maxsize=4)
def _modules(path: tuple[str, ...]) -> list[str]:
    """Names of the modules that can be imported."""
    return [info.name for info in pkgutil.iter_modules(path) if not info.name.startswith("_")]


def nearest_attribute(name: str, known: list[str], *, list_all: bool = True) -> str:
    """`; did you mean …?`, or the few names that there are; empty where that would not help."""
    public = [item for item in known if not item.startswith("_")]
    near = get_close_matches(name, public, n=1)
    if near:
        return f"; did you mean `{near[0]}`?"
    if list_all and 0 < len(public) <= 12:
        return f"; it has {', '.join(public)}"
    return ""


GROUPS: Mapping[str, str] = {
    "environment": "episode_engine.environments",
    "user": "episode_engine.users",
    "tool": "episode_engine.tools",
    "scorer": "episode_engine.scorers",
}
"""Kind -> the group of its entry points."""


def names_of(kind: str) -> list[str]:
    """The names that installed packages offer for a kind."""
    group = GROUPS.get(kind)
    return [] if group is None else sorted(installed_points(group))


def write_out(data: Any) -> list[tuple[DataPath, str]]:
    """Replace the short names in a spec's document by their entry points, in place; return what is wrong, and where.

    The document is not yet validated. Names that no package offers stay, and the rule `code.import` reports them.
    """
    problems: list[tuple[DataPath, str]] = []
    for path, kind, owner in _owners(data):
        use = owner.get("use")
        if not isinstance(use, str) or ":" in use or owner.get("adapter") is not None:
            continue
        packages = installed_points(GROUPS[kind]).get(use, {})
        if len(packages) > 1:
            offers = ", ".join(f"`{value}` ({package})" for value, package in sorted(packages.items()))
            message = f"several packages offer the {kind} `{use}`: {offers}; write one of these entry points"
            problems.append(((*path, "use"), message))
        else:
            owner["use"] = next(iter(packages), use)
    return problems


def _owners(data: Any) -> Iterator[tuple[DataPath, str, dict[str, Any]]]:
    """The mappings that may have a short name in `use`: path, kind and mapping."""
    if not isinstance(data, dict):
        return
    rewards, users, tools = data.get("rewards"), data.get("users"), data.get("tools")
    parts: list[tuple[DataPath, str, Any]] = [
        (("environment",), "environment", data.get("environment")),
        (("user",), "user", data.get("user")),
        (("rewards", "scorer"), "scorer", rewards.get("scorer") if isinstance(rewards, dict) else None),
    ]
    parts += [(("users", name), "user", user) for name, user in (users.items() if isinstance(users, dict) else ())]
    parts += [(("tools", index), "tool", tool) for index, tool in enumerate(tools if isinstance(tools, list) else [])]
    yield from ((path, kind, owner) for path, kind, owner in parts if isinstance(owner, dict))
