"""Descriptions of fields: the string below an attribute in the body of its class.

Pydantic's `use_attribute_docstrings` reads them when a class is made, so every process that imports the schemas would
pay for descriptions that only JSON Schemas, docs and a few messages use. Here they are read when they are asked for.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def description_of(model: type, key: str) -> str | None:
    """The description of a field: of `Field(description=…)`, or the string below the attribute; None without one.

    Args:
        model: A Pydantic model or a dataclass.
        key: The field's key in a document: its alias, if it has one.
    """
    field = key
    for name, info in getattr(model, "model_fields", {}).items():
        if key == (info.alias or name):
            if info.description is not None:
                return str(info.description)
            field = name
    for base in model.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return _of_module(base.__module__).get(base.__qualname__, {}).get(field)
    return None


def add_descriptions(schema: dict[str, Any], model: type) -> None:
    """Write the descriptions of fields into the properties of a class's JSON Schema, which is changed in place."""
    for key, described in schema.get("properties", {}).items():
        if (text := description_of(model, key)) is not None:
            described["description"] = text


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """The descriptions of each class of a module, by its qualified name; none where its source is not there."""
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        tree = ast.parse(Path(file).read_bytes()) if file else ast.Module(body=[], type_ignores=[])
    except (OSError, SyntaxError, ValueError):
        return {}
    return {place: dict(_of_body(node.body)) for place, node in _classes(tree.body, "")}


def _classes(body: Sequence[ast.stmt], inside: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield inside + node.name, node
        if isinstance(node, _SCOPES):
            yield from _classes(
                node.body, f"{inside}{node.name}{'.' if isinstance(node, ast.ClassDef) else '.<locals>.'}"
            )


def _of_body(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node.target.id, inspect.cleandoc(value.value)
