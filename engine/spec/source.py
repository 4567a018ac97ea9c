"""Entry points read as text: what a module defines, without importing it.

`engine validate` must not run the code of a spec, so it finds modules as the import system would, parses them, and says
only what holds whatever the code does: the module is not there, or its text binds no such name.

    found = read_entry("engine.environments.arithmetic:Arithmetic", base, access)
    found.node            # ast.ClassDef, or None where the name is bound in another way
"""

from __future__ import annotations

import ast
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from engine.spec.access import Access
from engine.spec.entry import EntryError, OwnModules, import_path, nearest_attribute, no_module, parse_entry

LARGEST = 2 * 2**20
"""Bytes of a module that is read."""
_IMPLICIT = frozenset({"__name__", "__doc__", "__file__", "__package__", "__spec__", "__dict__", "__loader__"})
_OPENING = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__", "modules"})
"""Names that let a module have attributes that its text does not bind."""


class NotImported(EntryError):
    """What stands for an entry point that was found as text, and not imported."""

    def __init__(self, use: str, node: ast.AST | None = None, file: Path | None = None) -> None:
        super().__init__(f"`{use}` is not imported here; add `--import`")
        self.node = node
        """The class or function; None where the name is bound in another way, or the text could not be read."""
        self.file = file
        """The file that defines `node`."""


@dataclass(frozen=True)
class ModuleText:
    """What the text of a module says."""

    tree: ast.Module
    names: frozenset[str]
    """Names that its text binds."""
    closed: bool
    """It has no other names."""


def read_entry(use: str, base: Path | None, access: Access) -> NotImported:
    """Find what `use` names, as `load_entry` would, and import nothing.

    Args:
        use: `package.module:Name`.
        base: The spec's folder.
        access: Which files may be opened; modules on the import path may, too.

    Raises:
        EntryError: it is not of that form, there is no such module, its text is no Python, or it binds no such name.
    """
    module, parts = parse_entry(use)
    file = _find(module, use, base, access)
    if file is None:
        return NotImported(use)
    text = _read(file, module)
    if text is None:
        return NotImported(use)
    name = parts[0]
    submodule = file.name == "__init__.py" and _has_submodule(file.parent, name)
    if text.closed and name not in text.names and name not in _IMPLICIT and not submodule:
        raise EntryError(f"`{module}` has no `{name}`{nearest_attribute(name, sorted(text.names))}")
    node = _definition(text.tree, name)
    for index, part in enumerate(parts[1:], start=1):
        if not isinstance(node, ast.ClassDef):
            return NotImported(use)
        bound, closed = _class_names(node)
        if closed and part not in bound and not hasattr(object, part):
            owner = ".".join([module, *parts[:index]])
            raise EntryError(f"`{owner}` has no `{part}`{nearest_attribute(part, sorted(bound))}")
        node = _definition(node, part)
    return NotImported(use, node, file)


# ---- finding a module


def _find(module: str, use: str, base: Path | None, access: Access) -> Path | None:
    """The module's file; None where it has none that may be read as text.

    Raises:
        EntryError: there is no such module.
    """
    search = import_path(base)
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    own = True
    parts = module.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        if index and path is None:
            raise EntryError(no_module(name, use, search, None))
        spec, own = _spec_of(name, path, search, base)
        if spec is None:
            raise EntryError(no_module(name, use, search, path))
        path = _places(spec)
    if spec is None:
        return None
    origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
    if origin is None or not str(origin).endswith(".py"):
        return None
    file = Path(origin)
    trusted = [Path(folder).resolve() for folder in (search if own else [file.parent]) if folder]
    return file if access.below(*(item for item in trusted if item != item.parent)).is_file(file) else None


def _spec_of(name: str, path: list[str] | None, search: list[str], base: Path | None) -> tuple[ModuleSpec | None, bool]:
    """What the finders say of a module, and whether it was found on the import path. Finders import nothing."""
    beside = OwnModules(None if base is None else str(base.resolve())).find_spec(name, path)
    if beside is not None:
        return beside, True
    for finder in sys.meta_path:
        if isinstance(finder, OwnModules):  # of a spec that was imported before
            continue
        own = finder is PathFinder
        try:
            places = search if own and path is None else path
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


def _has_submodule(folder: Path, name: str) -> bool:
    return any(info.name == name for info in pkgutil.iter_modules([str(folder)])) or (folder / name).is_dir()


# ---- reading it


def _read(file: Path, module: str) -> ModuleText | None:
    """The module's text; None where it is too large to be read, or cannot be.

    Raises:
        EntryError: it is no Python.
    """
    try:
        status = file.stat()
        found = _parse(str(file), status.st_mtime_ns, status.st_size)
    except OSError:
        return None
    if isinstance(found, SyntaxError):
        raise EntryError(f"importing `{module}` failed at {found.filename}:{found.lineno}: SyntaxError: {found}")
    return found


@lru_cache(maxsize=256)
def _parse(file: str, changed: int, size: int) -> ModuleText | SyntaxError | None:
    data = Access(roots=(Path(file).resolve().parent,)).read(Path(file), LARGEST) if size <= LARGEST else None
    if data is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings quote the line
            tree = ast.parse(data, filename=file)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError):
        return None
    names = frozenset(_bound(tree.body))
    declared = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return ModuleText(tree, names | declared, _is_closed(tree))


def _is_closed(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(item.name == "*" for item in node.names):
            return False
        if isinstance(node, ast.Name) and node.id in _OPENING:
            return False
        if isinstance(node, ast.Attribute) and node.attr in _OPENING:
            return False
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return False
    return True


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, those of nested blocks too; not those of functions and classes."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (item.asname or item.name.partition(".")[0] for item in statement.names)
            continue
        for node in _shallow(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                yield node.id
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (item.asname or item.name.partition(".")[0] for item in node.names)
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name
            elif isinstance(node, ast.MatchMapping) and node.rest:
                yield node.rest


def _shallow(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without what is inside of functions and classes."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _class_names(node: ast.ClassDef) -> tuple[frozenset[str], bool]:
    """Names that the body of a class binds, and whether it has no others."""
    names = frozenset(_bound(node.body))
    return names, not (node.bases or node.keywords or node.decorator_list) and _is_closed(
        ast.Module(body=node.body, type_ignores=[])
    )


def _definition(owner: ast.Module | ast.ClassDef, name: str) -> ast.AST | None:
    """The one class or function of this name, where nothing else binds it."""
    binding = [item for item in owner.body if name in _bound([item])]
    if len(binding) == 1 and isinstance(binding[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return binding[0]
    return None


# ---- what a definition says


def declared_events(node: ast.AST | None) -> tuple[str, ...] | None:
    """The events that a definition declares: `events = ("done",)` in a class, `@action("done")` on a function.

    None where its text does not say them as plain strings.
    """
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            target = item.targets[0] if isinstance(item, ast.Assign) and len(item.targets) == 1 else None
            target = item.target if isinstance(item, ast.AnnAssign) else target
            if isinstance(target, ast.Name) and target.id == "events":
                value = item.value if isinstance(item, ast.Assign | ast.AnnAssign) else None
                return _strings(value.elts) if isinstance(value, ast.Tuple | ast.List) else None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.decorator_list) == 1:
        call = node.decorator_list[0]
        if isinstance(call, ast.Call) and not call.keywords:
            function = call.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
            return _strings(call.args) if name == "action" else None
    return None


def _strings(items: Sequence[ast.expr]) -> tuple[str, ...] | None:
    found = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return tuple(found) if found and len(found) == len(items) else None
