"""Modules as text: what names the text of a module binds. Nothing is imported."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from engine.schemas.base import Struct
from engine.spec.access import Access
from engine.spec.code.entry import EntryError

LARGEST = 2 * 2**20
"""Maximum size of a module that is read, in bytes."""
_OPENING = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__", "modules"})
"""Names that let a module have attributes that its text does not bind."""


class ModuleText(Struct, frozen=True, kw_only=True, eq=False):
    """What the text of a module says."""

    tree: ast.Module
    names: frozenset[str]
    """Names that its text binds."""
    closed: bool
    """It has no other names."""
    bindings: Mapping[str, Sequence[ast.stmt]]
    """The top-level statements that bind each name; those under `if TYPE_CHECKING:` count as top-level."""
    changed: frozenset[str]
    """Names that functions bind with `global`, and names whose attributes the module sets."""


def read_module(file: Path, module: str) -> ModuleText | None:
    """The module's text; None where it is too large to be read, or cannot be.

    Raises:
        EntryError: it is no Python.
    """
    try:
        status = file.stat()
        text = _parse(str(file), status.st_mtime_ns, status.st_size)
    except OSError:
        return None
    if isinstance(text, SyntaxError):
        raise EntryError(f"importing `{module}` failed at {text.filename}:{text.lineno}: SyntaxError: {text}")
    return text


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
    nodes = list(ast.walk(tree))
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    patched = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    given = [node.args[0] for node in calls if node.args and getattr(node.func, "id", "") == "setattr"]
    patched |= {item.id for item in given if isinstance(item, ast.Name)}
    bindings: dict[str, list[ast.stmt]] = {}
    for statement in _statements(tree.body):
        for name in dict.fromkeys(bound_names([statement])):
            bindings.setdefault(name, []).append(statement)
    names = frozenset(bindings) | declared
    return ModuleText(
        tree=tree, names=names, closed=is_closed(tree), bindings=bindings, changed=frozenset(declared | patched)
    )


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
        named = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else None
        if isinstance(statement, ast.If) and named == "TYPE_CHECKING":
            yield from statement.body
        else:
            yield statement


def is_closed(tree: ast.Module) -> bool:
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


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
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
