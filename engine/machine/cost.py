"""An upper bound for the work of an expression, found without running it.

The CEL library has no budget of its own, and a call of it cannot be stopped. `all`, `exists`, `filter` and `map` inside of
each other multiply the lengths of their lists, and `map` and `filter` copy what they have built at every step.

Invariant: the bound only grows with the sizes that are given, so sizes that are too large never hide a costly expression.
One unit is about 0.1 to 0.4 microseconds of the library's time: a node visited, or a value copied or compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.machine.expression import Call, Comprehension, ListOf, MapOf, Name, Node, Operation

MOST_WORK = 1_000_000
"""Units that one evaluation may cost: some tenths of a second, in which no other episode moves."""
MOST_COUNTED = 200_000
"""Values in one variable that are counted before a loop: the counting itself takes time."""
_CHARACTERS = 1_000
"""Characters that a text function reads in one unit."""
_MATCHED = 50
"""Characters that `matches` reads in one unit."""
_COMPILED = 1_000
"""Units that `matches` takes to read its pattern, at every call."""
_DEEPEST = 6
"""Loops inside of each other that are looked into; each level doubles the work of finding the bound."""
_MOST = 10**15
"""Bounds are not counted beyond this: nested lists would otherwise make very large integers."""


class Sizes(NamedTuple):
    """How large the values of an expression's variables are, at most."""

    length: int
    """Elements of the longest list or map, at any depth."""
    nodes: int
    """Values in the largest variable, at all depths together."""
    characters: int
    """Of the longest text."""


ASSUMED = Sizes(length=64, nodes=65, characters=10_000)
"""What a check before the run takes facts and task fields to hold."""


def sizes_of(values: Iterable[Any]) -> Sizes:
    """The sizes of the values that variables have; with more than `MOST_COUNTED` nodes, sizes that no loop is allowed on."""
    length = most = characters = 0
    for value in values:
        nodes = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            nodes += 1
            if nodes > MOST_COUNTED:
                return Sizes(_MOST, _MOST, _MOST)
            if isinstance(item, str):
                characters = max(characters, len(item))
            elif isinstance(item, Mapping):
                length = max(length, len(item))
                waiting.extend(item.values())
                nodes += len(item)
                characters = max(characters, *map(len, map(str, item)), 0)
            elif isinstance(item, list | tuple):
                length = max(length, len(item))
                waiting.extend(item)
        most = max(most, nodes)
    return Sizes(length, most, characters)


class _Bound(NamedTuple):
    """A part of an expression: the work to evaluate it, and how large its value may be."""

    work: int
    length: int
    nodes: int


def work_of(tree: Node, sizes: Sizes) -> int:
    """The most units that evaluating the expression may cost.

    Args:
        tree: From `parse`.
        sizes: Of its variables.
    """
    return _bound(tree, sizes, {}).work


def is_looping(tree: Node) -> bool:
    """Whether the expression goes through a list or a map; if not, its work is a multiple of its own length."""
    return any(isinstance(node, Comprehension) for node in tree.walk())


def _bound(node: Node, sizes: Sizes, variables: Mapping[str, _Bound], level: int = 0) -> _Bound:
    if isinstance(node, Name):
        return variables.get(node.name) or _Bound(1, sizes.length, sizes.nodes)
    if isinstance(node, Comprehension):
        return _loop(node, sizes, variables, level)
    parts = [_bound(child, sizes, variables, level) for child in node.children()]
    work = 1 + sum(part.work for part in parts)
    length = max((part.length for part in parts), default=0)
    nodes = sum(part.nodes for part in parts) + 1
    if isinstance(node, ListOf | MapOf):
        return _capped(work + nodes, max(length, len(node.items)), nodes)
    if isinstance(node, Call):
        read = sizes.characters // _CHARACTERS
        work += _COMPILED + sizes.characters // _MATCHED if node.name == "matches" else read
        return _capped(work, length, nodes)
    if isinstance(node, Operation) and node.operator in ("+", "==", "!=", "in", "<", "<=", ">", ">="):
        joined = sum(part.length for part in parts) if node.operator == "+" else 0
        copied = nodes if node.operator in ("+", "==", "!=", "in") else 1  # only texts and numbers have an order
        return _capped(work + copied + sizes.characters // _CHARACTERS, joined, nodes if joined else 1)
    return _capped(work, length, nodes)


def _loop(node: Comprehension, sizes: Sizes, variables: Mapping[str, _Bound], level: int = 0) -> _Bound:
    """A loop's bound. Its elements have at most the nodes of the whole list between them.

    A body's work grows at least in proportion with its element, so the costliest list has one element that holds
    everything, and the others are scalars.
    """
    over = _bound(node.over, sizes, variables, level)
    if level == _DEEPEST:
        return _Bound(_MOST, over.length, over.nodes)
    scalar, whole = (
        [_bound(body, sizes, {**variables, node.variable: element}, level + 1) for body in node.bodies]
        for element in (_Bound(1, 0, 1), _Bound(1, over.nodes, over.nodes))
    )
    each, largest = (1 + sum(body.work for body in bodies) for bodies in (scalar, whole))
    work = 1 + over.work + over.length * each + largest
    if node.name == "map":
        nodes = 1 + over.length * scalar[-1].nodes + whole[-1].nodes
        length = max(over.length, whole[-1].length)
    elif node.name == "filter":
        nodes, length = over.nodes, over.length
    else:
        return _capped(work, 0, 1)
    return _capped(work + over.length * nodes // 2, length, nodes)


def _capped(work: int, length: int, nodes: int) -> _Bound:
    return _Bound(min(work, _MOST), min(length, _MOST), min(nodes, _MOST))
