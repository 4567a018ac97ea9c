"""Public docstrings name the errors that a callable raises itself, and the shapes of the arrays that it takes and returns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDERS = ["engine", "schemas", "environments"]
ARRAYS = {"ndarray", "NDArray", "ArrayLike", "Tensor", "LongTensor", "FloatTensor", "BoolTensor"}
SHAPE = re.compile(
    r"\[[A-Za-z0-9_ ,.*/+\-]+\]"  # [n], [batch, time]
    r"|\((?:[A-Za-z0-9_*/+\-]+, ?)+[A-Za-z0-9_*/+\-]*\)"  # (B, T), (n,)
    r"|\b(?:shapes?|scalars?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Callable:
    """One public function or method, and every text that documents it."""

    where: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    text: str


@cache
def _modules() -> list[tuple[Path, ast.Module]]:
    """Every module of the three folders; `engine/schemas` and `engine/environments` are links to the other two."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    seen: dict[Path, Path] = {path.resolve(): path for path in paths}
    return [(path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))) for path in seen]


@cache
def _classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for _, tree in _modules() for node in tree.body if isinstance(node, ast.ClassDef)}


def _inherited(owner: ast.ClassDef | None, method: str) -> str:
    """The docstring of a method in the classes above its own, or else in a protocol that has it."""
    bases = [] if owner is None else [_classes()[name] for base in owner.bases if (name := _name(base)) in _classes()]
    bases = [base for base in bases if base is not owner]  # `class Struct(msgspec.Struct)`
    for base in bases:
        for node in base.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                return ast.get_docstring(node) or ""
        if found := _inherited(base, method):
            return found
    protocols = [node for node in _classes().values() if any(_name(base) == "Protocol" for base in node.bases)]
    found = [node for protocol in protocols for node in protocol.body if getattr(node, "name", "") == method]
    return "\n".join(ast.get_docstring(node) or "" for node in found)  # type: ignore[arg-type]


def _callables(path: Path, tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[Callable]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _callables(path, node, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            made = owner is not None and node.name in ("__init__", "__post_init__", "__call__")
            if node.name.startswith("_") and not made:
                continue
            text = ast.get_docstring(node) or _inherited(owner, node.name)
            if made and owner is not None:
                text += "\n" + (ast.get_docstring(owner) or "")
            name = f"{owner.name}.{node.name}" if owner else node.name
            yield Callable(f"{path}:{node.lineno} {name}", node, text)


def _raised(node: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names of the errors that a function raises itself and does not catch; without the functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Raise) and not _error_classes().get(_name(child.exc), set()) & caught:
            yield _name(child.exc)
        elif isinstance(child, ast.Try):
            types = [handler.type for handler in child.handlers if handler.type is not None]
            here = {_name(each) for found in types for each in ast.walk(found)}
            tried = ast.Module(child.body, [])
            yield from _raised(tried, caught | {name for name in here if name in _error_classes()})
            yield from _raised(ast.Module([*child.handlers, *child.orelse, *child.finalbody], []), caught)
            continue
        yield from _raised(child, caught)


def _name(node: ast.AST | None) -> str:
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


@cache
def _error_classes() -> dict[str, set[str]]:
    """Each class of the tree of `engine.errors`, with its ancestors up to `EngineError`."""
    bases = {name: {_name(base) for base in node.bases} for name, node in _classes().items()}

    def ancestors(name: str) -> set[str]:
        return {name} | {each for base in bases.get(name, ()) if base != name for each in ancestors(base)}

    return {name: found - {"Exception"} for name in bases if "EngineError" in (found := ancestors(name))}


def _aliases(tree: ast.Module) -> set[str]:
    """Names that a module gives to array types."""
    return {
        _name(node.targets[0])
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Subscript | ast.Name | ast.Attribute)
        and _names(node.value) & ARRAYS
    }


@cache
def _all_aliases() -> dict[str, set[str]]:
    """Each module's aliases, by its dotted name."""
    return {".".join(path.with_suffix("").parts): _aliases(tree) for path, tree in _modules()}


def _array_names(tree: ast.Module) -> set[str]:
    """The names of arrays in a module: types, its own aliases, and those that it imports."""
    imported = {
        alias.name
        for statement in tree.body
        for node in (statement.body if isinstance(statement, ast.If) else [statement])  # `if TYPE_CHECKING:`
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in _all_aliases().get(node.module or "", ())
    }
    return ARRAYS | _aliases(tree) | imported


def _names(annotation: ast.AST | None) -> set[str]:
    if annotation is None:
        return set()
    found = {_name(node) for node in ast.walk(annotation)}
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value))
    return found


def _raises_unnamed() -> list[str]:
    errors = _error_classes()
    found = []
    for path, tree in _modules():
        for each in _callables(path, tree):
            raised = set(_raised(each.node)) & errors.keys()
            found += [
                f"{each.where} raises {name}"
                for name in sorted(raised)
                if not _says(each.text, errors[name] - {"EngineError"} or {name})
            ]
    return found


def _says(text: str, names: set[str]) -> bool:
    return any(re.search(rf"\b{name}\b", text) for name in names)


def _shapeless() -> list[str]:
    found = []
    for path, tree in _modules():
        arrays = _array_names(tree)
        for each in _callables(path, tree):
            arguments = each.node.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            annotations = [each.node.returns, *(one.annotation for one in given if one is not None)]
            if any(_names(one) & arrays for one in annotations) and not SHAPE.search(each.text):
                found.append(each.where)
    return found


def test_errors_that_a_callable_raises_are_in_its_docstring() -> None:
    assert _raises_unnamed() == []


def test_docstrings_of_array_functions_give_shapes() -> None:
    assert _shapeless() == []
