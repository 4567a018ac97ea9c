"""Why a guard failed on real values, in words that say what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.machine.celext import cel_module
from engine.machine.expression import Constant, ExpressionError, Index, Name, Node, Operation, Select, parse
from engine.machine.inference import describe


def explain(expression: str, error: Exception, context: Mapping[str, Any]) -> str:
    """What a failed evaluation missed, and what to write instead."""
    try:
        tree = parse(expression)
    except ExpressionError:
        return str(error)
    reads = [node for node in tree.walk() if isinstance(node, Select | Index)]
    if isinstance(error, KeyError):
        for node in reads:
            path = _path(node, expression)
            if path is not None and path[-1] == error.args[0] and _missing(path, context):
                whole = _clause(tree, node)
                return _absent(expression[node.start : node.end], path, expression[whole.start : whole.end])
        return f"there is no {error}"
    if isinstance(error, TypeError):
        kinds = dict.fromkeys(
            f"`{expression[node.start : node.end]}` is {_kind(value)}"
            for node in reads
            if (path := _path(node, expression)) is not None
            and (value := _value(path, context)) is not _ABSENT
            and not isinstance(value, Mapping)
        )
        what = f"types do not fit: {', '.join(kinds)}" if kinds else f"types do not fit ({str(error).split('. ')[0]})"
        return f"{what}. Convert with `int(x)`, `double(x)`, `string(x)`, or test `type(x) == bool` first"
    if isinstance(error, IndexError):
        return f"{error}; test `size(…)` first"
    if isinstance(error, ZeroDivisionError):
        return "division by zero; test the divisor first (`x != 0 && …`)"
    return str(error).split(". Check")[0]


_ABSENT = object()


def _path(node: Node, text: str) -> list[str] | None:
    """`facts.a["b"]` -> `["facts", "a", "b"]`; None for what is no chain of names."""
    if isinstance(node, Name):
        return [node.name]
    if isinstance(node, Select):
        before = _path(node.of, text)
        return None if before is None else [*before, node.field]
    if isinstance(node, Index) and isinstance(node.key, Constant) and node.key.type == "string":
        before = _path(node.of, text)
        return None if before is None else [*before, str(cel_module().compile(node.key.text).execute())]
    return None


def _value(path: Sequence[str], context: Mapping[str, Any]) -> Any:
    value: Any = context
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def _missing(path: Sequence[str], context: Mapping[str, Any]) -> bool:
    return isinstance(_value(path[:-1], context), Mapping) and _value(path, context) is _ABSENT


def _clause(tree: Node, part: Node) -> Node:
    """The largest part of `tree` around `part` that is one condition: what a test must come before."""
    for node in tree.walk():
        inside = node.start <= part.start and part.end <= node.end
        if inside and not (isinstance(node, Operation) and node.operator in ("&&", "||", "!", "?:")):
            return node
    return part


def _absent(said: str, path: Sequence[str], clause: str) -> str:
    test = f"has({said})"
    if not said.endswith(f".{path[-1]}"):  # `has` takes a field alone
        test = f"'{path[-1]}' in {said[: said.rindex('[')]}"
    return f"`{said}` is not there; write `{test} && {clause}`"


def _kind(value: object) -> str:
    """The CEL type of a Python value, in words."""
    names = {bool: "bool", int: "int", float: "double", str: "string", bytes: "bytes", type(None): "null"}
    name = names.get(type(value), "list" if isinstance(value, list | tuple) else type(value).__name__)
    return describe(frozenset({name}))
