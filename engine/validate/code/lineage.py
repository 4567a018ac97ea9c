"""Classes read as text, with their bases: which methods an object has.

family = lineage(definition, sources)
family.classes                              # the class and its bases, in the order of Python's MRO
member(definition, "respond", sources)      # the method's definition, "missing" or "unknown"
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Literal

from engine.schemas.base import Struct
from engine.validate.code.module_text import bound_names, is_closed
from engine.validate.code.source import MAX_STEPS, Definition, External, Sources, inside, last_name

_KNOWN_BASES = frozenset(
    {
        "builtins.object",
        "abc.ABC",
        *(f"{module}.{name}" for module in ("typing", "typing_extensions") for name in ("Generic", "Protocol")),
    }
)
"""Bases that add no method which the engine calls."""
_KNOWN_DECORATORS = frozenset({"dataclass", "final", "runtime_checkable"})
"""Decorators of classes that remove no method."""


class Lineage(Struct, frozen=True, kw_only=True, eq=False):
    """A class with its bases."""

    classes: Sequence[Definition]
    """In the order of Python's MRO, the class first."""
    complete: bool
    """Whether these are all, and nothing else adds members to them."""


def lineage(definition: Definition, sources: Sources) -> Lineage:
    """Return a class with its bases."""
    cached = sources.lineages.get(definition.node)
    if cached is None:
        types: dict[ast.AST, type] = {}
        try:
            top, complete = _type_of(definition, sources, types, 0)
            classes = [vars(item)["definition"] for item in top.__mro__ if "definition" in vars(item)]
        except TypeError:  # bases that Python refuses
            classes, complete = [definition], False
        cached = sources.lineages[definition.node] = Lineage(classes=classes, complete=complete)
    return cached


def _type_of(definition: Definition, sources: Sources, types: dict[ast.AST, type], steps: int) -> tuple[type, bool]:
    """Return an empty class with the same bases, so that Python orders them, and whether all of them are known."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    complete = steps <= MAX_STEPS and node.name not in definition.module.text.changed and _is_plain(node)
    bases: list[type] = []
    for item in node.bases if steps <= MAX_STEPS else ():
        base = sources.resolve(item.value if isinstance(item, ast.Subscript) else item, definition.module)
        if isinstance(base, Definition) and isinstance(base.node, ast.ClassDef):
            if base.node not in types:
                types[base.node], whole = _type_of(base, sources, types, steps + 1)
                complete = complete and whole
            bases.append(types[base.node])
        elif not (isinstance(base, External) and base.name in _KNOWN_BASES):
            complete = False
    return type(node.name, tuple(bases), {"definition": definition}), complete


def _is_plain(node: ast.ClassDef) -> bool:
    """Whether the body of a class shows all its own members."""
    body = ast.Module(body=node.body, type_ignores=[])
    hooks = {"__getattribute__", "__init_subclass__", "__class_getitem__"} & set(bound_names(node.body))
    metaclass = [item for item in node.keywords if item.arg != "metaclass" or last_name(item.value) != "ABCMeta"]
    decorated = [item for item in node.decorator_list if last_name(item) not in _KNOWN_DECORATORS]
    return is_closed(body) and not hooks and not metaclass and not decorated


def member(definition: Definition, name: str, sources: Sources) -> Definition | Literal["missing", "unknown"]:
    """Return the method of a class; `unknown` where the text leaves open what it is, or whether there is one."""
    family = lineage(definition, sources)
    for item in family.classes:
        assert isinstance(item.node, ast.ClassDef)
        if name in _self_attributes(item.node):
            return "unknown"
        if name in bound_names(item.node.body):
            found = inside(item, name)
            if _is_stub(item, found):
                continue
            certain = family.complete or item.node is definition.node
            return found if found is not None and certain and not isinstance(found.node, ast.ClassDef) else "unknown"
    return "missing" if family.complete else "unknown"


def _is_stub(owner: Definition, found: Definition | None) -> bool:
    """Whether a member is only declared, by a `Protocol`."""
    assert isinstance(owner.node, ast.ClassDef)
    if found is None or not any(last_name(item) == "Protocol" for item in owner.node.bases):
        return False
    return all(
        isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        for item in found.node.body
    )


def _self_attributes(node: ast.ClassDef) -> frozenset[str]:
    """Attributes that the methods of a class set on their object."""
    return frozenset(
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and isinstance(item.value, ast.Name)
    )
