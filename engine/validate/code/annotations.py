"""Annotations read as text: whether a value, or the result of a function, can have the type that is written.

Invariant: the answer is no only if the annotation excludes the value whatever the code does. Names that cannot be read,
type variables, classes of the spec's own, `Any` and whatever converts its argument exclude nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from engine.schemas.base import Struct
from engine.validate.code.source import Alias, Def, Definition, External, Module, Sources, lineage

MAX_STEPS = 12
"""Maximum nesting of an annotation."""
_WRAPPERS = frozenset({"Annotated", "Final", "Required", "NotRequired", "ReadOnly"})
"""`Annotated[T, …]` and the like: the type is their first argument."""
_AWAITED = frozenset({"Awaitable", "Coroutine"})
"""What an `async` function returns: the result is their last argument."""


class Scope(Struct, frozen=True, kw_only=True):
    """Where an annotation is written."""

    sources: Sources
    module: Module
    hidden: frozenset[str] = frozenset()
    """Names that mean something else there: type parameters, and what the body of the class binds."""


class Head(Struct, frozen=True, kw_only=True):
    """One member of an annotation's union."""

    name: str
    """Such as `int`, `None`, `list`, `Literal`, or `package.module.Name` of a class that is read."""
    arguments: Sequence[ast.expr]
    """What is in its brackets."""
    scope: Scope
    definition: Definition | None = None
    """The class, if it is read."""


def scope_of(definition: Definition, sources: Sources) -> Scope:
    """Return the scope of the annotations of a function or class."""
    nodes = [definition.node, *([definition.owner] if definition.owner is not None else [])]
    hidden = {str(item.name) for node in nodes for item in getattr(node, "type_params", [])}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            hidden |= {item.name for item in node.body if isinstance(item, Def)}
            hidden |= {
                item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
            }
    return Scope(sources=sources, module=definition.module, hidden=frozenset(hidden))


def heads(annotation: ast.expr, scope: Scope, steps: int = 0) -> list[Head] | None:
    """Return the members of an annotation's union; None if one of them cannot be read."""
    if steps > MAX_STEPS:
        return None
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return [Head(name="None", arguments=(), scope=scope)]
        try:
            quoted = ast.parse(annotation.value, mode="eval").body if isinstance(annotation.value, str) else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return None if quoted is None else heads(quoted, scope, steps + 1)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _all([annotation.left, annotation.right], scope, steps)
    arguments: Sequence[ast.expr] = ()
    named = annotation
    if isinstance(annotation, ast.Subscript):
        named = annotation.value
        arguments = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    definition = scope.sources.resolve(named, scope.module, scope.hidden)
    if isinstance(definition, Alias):
        return (
            None
            if arguments
            else heads(definition.expression, Scope(sources=scope.sources, module=definition.module), steps + 1)
        )
    if isinstance(definition, Definition) and isinstance(definition.node, ast.ClassDef):
        return [Head(name=definition.name, arguments=arguments, scope=scope, definition=definition)]
    if not isinstance(definition, External) or definition.is_module:
        return None
    module, _, name = definition.name.rpartition(".")
    if module not in ("builtins", "typing", "typing_extensions", "collections.abc"):
        return None
    if name in _WRAPPERS and arguments:
        return heads(arguments[0], scope, steps + 1)
    if name == "Union":
        return _all(arguments, scope, steps)
    if name == "Optional" and arguments:
        inner = heads(arguments[0], scope, steps + 1)
        return None if inner is None else [*inner, Head(name="None", arguments=(), scope=scope)]
    return [Head(name=_PLAIN.get(name, name), arguments=arguments, scope=scope)]


def _all(annotations: Sequence[ast.expr], scope: Scope, steps: int) -> list[Head] | None:
    heads_of_items = [heads(item, scope, steps + 1) for item in annotations]
    return None if None in heads_of_items else [head for item in heads_of_items if item is not None for head in item]


_PLAIN = {
    "Dict": "dict",
    "Mapping": "dict",
    "MutableMapping": "dict",
    "List": "list",
    "MutableSequence": "list",
    "Tuple": "tuple",
    "Set": "set",
    "AbstractSet": "set",
    "FrozenSet": "frozenset",
    "Text": "str",
}


# ---- values


def excludes(annotation: ast.expr, value: Any, scope: Scope, steps: int = 0) -> bool:
    """Whether no value of an annotation's type is written in YAML as `value`. A list may stand for a tuple or a set."""
    all_heads = heads(annotation, scope, steps)
    return all_heads is not None and all(_head_excludes(head, value, steps) for head in all_heads)


def _head_excludes(head: Head, value: Any, steps: int) -> bool:
    if head.definition is not None:
        return False
    if head.name == "Literal":
        try:
            listed = [ast.literal_eval(item) for item in head.arguments]
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False
        return not any(type(item) is type(value) and item == value for item in listed)
    accepts = _VALUES.get(head.name)
    if accepts is None:
        return False
    if not isinstance(value, accepts) or (head.name == "bool" and value not in (0, 1)):
        return True
    inside = head.arguments
    if head.name == "tuple" and isinstance(value, list) and inside:
        if len(inside) == 2 and isinstance(inside[1], ast.Constant) and inside[1].value is ...:
            return any(excludes(inside[0], item, head.scope, steps + 1) for item in value)
        return len(inside) != len(value) or any(
            excludes(kind, item, head.scope, steps + 1) for kind, item in zip(inside, value, strict=False)
        )
    if isinstance(value, list) and len(inside) == 1:
        return any(excludes(inside[0], item, head.scope, steps + 1) for item in value)
    if isinstance(value, Mapping) and head.name == "dict" and len(inside) == 2:
        keys = any(excludes(inside[0], key, head.scope, steps + 1) for key in value)
        return keys or any(excludes(inside[1], item, head.scope, steps + 1) for item in value.values())
    return False


_VALUES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "complex": (int, float),
    "bool": (int,),
    "str": (str,),
    "None": (type(None),),
    "NoneType": (type(None),),
    "list": (list,),
    "tuple": (list,),
    "set": (list,),
    "frozenset": (list,),
    "dict": (Mapping,),
    "Sequence": (list, str),
    "Collection": (list, str, Mapping),
    "Iterable": (list, str, Mapping),
    "Callable": (),
}
"""What YAML writes for each type; of integers, a boolean is 0 or 1. A type that is not here accepts anything."""


# ---- results


class Wanted(Struct, frozen=True, kw_only=True):
    """What a function must return."""

    classes: frozenset[str] = frozenset()
    """Names of classes, any of which is right: `engine.schemas.environment.UserTurn`."""
    heads: frozenset[str] = frozenset()
    """Names of other types that are right."""
    items: frozenset[str] = frozenset()
    """Where a list is right, the classes of its items; empty: any."""
    wrong: frozenset[str] | None = None
    """Types that are wrong; None: each builtin type and each class that is read and is not right."""


BUILTIN = frozenset(
    {
        "int",
        "float",
        "complex",
        "bool",
        "str",
        "bytes",
        "bytearray",
        "None",
        "list",
        "tuple",
        "set",
        "frozenset",
        "dict",
    }
)


def returns_wrong(function: Definition, wanted: Wanted, sources: Sources) -> str | None:
    """The annotation of a function's result if it excludes what is wanted; None if it does not, or cannot be read."""
    node = function.node
    if isinstance(node, ast.ClassDef) or node.returns is None:
        return None
    result_heads = heads(node.returns, scope_of(function, sources))
    if result_heads is None or not result_heads or not all(_is_wrong(head, wanted) for head in result_heads):
        return None
    return ast.unparse(node.returns).strip("'\"")


def _is_wrong(head: Head, wanted: Wanted, steps: int = 0) -> bool:
    if head.name in _AWAITED and head.arguments and steps < MAX_STEPS:
        inner = heads(head.arguments[-1], head.scope, steps)
        return bool(inner) and all(_is_wrong(item, wanted, steps + 1) for item in inner or ())
    if head.name in wanted.heads:
        items = heads(head.arguments[0], head.scope) if wanted.items and len(head.arguments) == 1 else None
        return bool(items) and all(_is_wrong(item, Wanted(classes=wanted.items)) for item in items or ())
    if head.definition is not None:
        classes, complete = lineage(head.definition, head.scope.sources)
        if any(item.name in wanted.classes for item in classes):
            return False
        is_known = complete or any(item.name in _CONTRACTS for item in classes)
        return is_known and (wanted.wrong is None or any(item.name in wanted.wrong for item in classes))
    return head.name in (BUILTIN if wanted.wrong is None else wanted.wrong)


_ENVIRONMENT = "engine.schemas.environment"
RESET, STEP, USER_TURN, TOOL_REPLY = (f"{_ENVIRONMENT}.{name}" for name in ("Reset", "Step", "UserTurn", "ToolReply"))
REWARD = "engine.schemas.reward.RewardEvent"
MESSAGE = "engine.schemas.message.Message"
_CONTRACTS = frozenset({RESET, STEP, USER_TURN, TOOL_REPLY, REWARD, MESSAGE})
"""Classes whose bases need not be read."""
REWARDS = Wanted(heads=frozenset({"list"}), items=frozenset({REWARD}))
TASK_ROWS = Wanted(wrong=frozenset({"int", "float", "bool", "str", "bytes", "None", *_CONTRACTS}))
TOOLS = Wanted(wrong=frozenset({"int", "float", "bool", "str", "bytes", "None", "dict", *_CONTRACTS}))
TOOL_RESULT = Wanted(
    wrong=frozenset(
        {
            "bytes",
            "bytearray",
            "set",
            "frozenset",
            "complex",
            "Generator",
            "Iterator",
            "AsyncIterator",
            *(_CONTRACTS - {TOOL_REPLY}),
        }
    )
)
"""A tool's result is a string, a `ToolReply`, or what JSON can hold."""
