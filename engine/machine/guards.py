"""The text of a guard -> a function of documented, typed variables, compiled once and checked before a run.

A guard returns true or false, or raises a `GuardError` that says what to write instead. Evaluation changes nothing, so
many episodes may share a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import GuardError
from engine.machine.evaluate import EvaluationError, compile_tree
from engine.machine.expression import Call, Comprehension, ExpressionError, ListOf, MapOf, Name, Node, Operation, parse
from engine.machine.inference import GuardProblem, TypeInference, describe
from engine.machine.operators import NUMBERS
from engine.machine.variables import BOOL, DYN, STRING, VARIABLES, Variable
from engine.schemas.base import Struct
from engine.terminal import around, brief

MAX_WORK = 1_000_000
"""Units that one evaluation may cost: a few tenths of a second."""
MAX_COUNTED = 200_000
"""Values of one variable that are counted before a loop; counting takes time too."""
_CHARACTERS_PER_UNIT = 1_000
"""Characters that a string function reads in one unit."""
_MATCHED_PER_UNIT = 50
"""Characters that `matches` reads in one unit."""
_PATTERN_UNITS = 1_000
"""Units that `matches` takes to compile its pattern, at every call."""
_MAX_NESTED_LOOPS = 6
"""Nesting levels of loops that are examined; each level doubles the work of computing the bound."""
_MAX_BOUND = 10**15
"""Larger bounds are cut to this: nested lists would otherwise give very large integers."""


class Sizes(Struct, frozen=True, kw_only=True):
    """Upper bounds for the values of an expression's variables."""

    length: int
    """Elements of the longest list or map, at any depth."""
    nodes: int
    """Values in the largest variable, at all depths together."""
    characters: int
    """Characters of the longest string."""


ASSUMED_SIZES = Sizes(length=64, nodes=65, characters=10_000)
"""The sizes of facts and task fields that a check before the run assumes."""


def sizes_of(values: Iterable[Any]) -> Sizes:
    """Return the sizes of variables; for more than `MAX_COUNTED` values, sizes on which no loop is allowed."""
    length = most = characters = 0
    for value in values:
        nodes = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            nodes += 1
            if nodes > MAX_COUNTED:
                return Sizes(length=_MAX_BOUND, nodes=_MAX_BOUND, characters=_MAX_BOUND)
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
    return Sizes(length=length, nodes=most, characters=characters)


_Bound = tuple[int, int, int]
"""(work, length, nodes): upper bounds for the work to evaluate a part of an expression, and the size of its value."""


def work_of(tree: Node, sizes: Sizes) -> int:
    """Return the maximum number of units that evaluating the expression may cost.

    Evaluation cannot be interrupted, and no other episode runs meanwhile. Nested macros (`all`, `exists`, `filter`,
    `map`) multiply the lengths of their lists. The bound is monotonic in the sizes, so sizes that are too large never
    hide a costly expression. One unit is a node visited, or a value copied or compared: about 0.1 to 0.4 microseconds.

    Args:
        tree: From `parse`.
        sizes: Upper bounds for its variables.
    """
    return _bound(tree, sizes, {})[0]


def is_looping(tree: Node) -> bool:
    """Whether the expression loops over a list or a map; if not, its work is proportional to its own length."""
    return any(isinstance(node, Comprehension) for node in tree.walk())


def _bound(node: Node, sizes: Sizes, variables: Mapping[str, _Bound], level: int = 0) -> _Bound:
    if isinstance(node, Name):
        return variables.get(node.name, (1, sizes.length, sizes.nodes))
    if isinstance(node, Comprehension):
        return _loop(node, sizes, variables, level)
    parts = [_bound(child, sizes, variables, level) for child in node.children()]
    work = 1 + sum(work for work, _, _ in parts)
    lengths = [length for _, length, _ in parts]
    length = max(lengths, default=0)
    nodes = sum(nodes for _, _, nodes in parts) + 1
    if isinstance(node, ListOf | MapOf):
        return _capped(work + nodes, max(length, len(node.items)), nodes)
    if isinstance(node, Call):
        read = sizes.characters // _CHARACTERS_PER_UNIT
        work += _PATTERN_UNITS + sizes.characters // _MATCHED_PER_UNIT if node.name == "matches" else read
        return _capped(work, length, nodes)
    if isinstance(node, Operation) and node.operator in ("+", "==", "!=", "in", "<", "<=", ">", ">="):
        joined = sum(lengths) if node.operator == "+" else 0
        copied = nodes if node.operator in ("+", "==", "!=", "in") else 1  # only strings and numbers are ordered
        return _capped(work + copied + sizes.characters // _CHARACTERS_PER_UNIT, joined, nodes if joined else 1)
    return _capped(work, length, nodes)


def _loop(node: Comprehension, sizes: Sizes, variables: Mapping[str, _Bound], level: int = 0) -> _Bound:
    """The bound of a loop. Together, its elements have at most the nodes of the whole list.

    A body's work grows at least in proportion to the size of its element, so the worst list has one element that holds
    everything, and scalars otherwise.
    """
    work_of_over, length, nodes = _bound(node.over, sizes, variables, level)
    if level == _MAX_NESTED_LOOPS:
        return _MAX_BOUND, length, nodes
    scalar, everything = (
        [_bound(body, sizes, {**variables, node.variable: element}, level + 1) for body in node.bodies]
        for element in ((1, 0, 1), (1, nodes, nodes))
    )
    usual, largest = (1 + sum(work for work, _, _ in bodies) for bodies in (scalar, everything))
    work = 1 + work_of_over + length * usual + largest
    if node.name not in ("map", "filter"):
        return _capped(work, 0, 1)
    loops = length
    if node.name == "map":
        (_, _, usual_nodes), (_, longest, most_nodes) = scalar[-1], everything[-1]
        nodes, length = 1 + loops * usual_nodes + most_nodes, max(loops, longest)
    return _capped(work + loops * nodes // 2, length, nodes)


def _capped(work: int, length: int, nodes: int) -> _Bound:
    return min(work, _MAX_BOUND), min(length, _MAX_BOUND), min(nodes, _MAX_BOUND)


MAX_CHARACTERS = 4_000
"""Characters that an expression may have."""


class Guard:
    """One compiled CEL expression.

    guard = Guard("turns.user < limits.user_turns")
    guard.names                                                             # frozenset({"limits", "turns"})
    guard.evaluate({"turns": {"user": 1}, "limits": {"user_turns": 3}})     # True

    Raises:
        GuardError: the expression is too long, is not valid, or calls a function that does not exist.
    """

    __slots__ = ("_evaluate", "_looping_tree", "expression", "names")

    def __init__(self, expression: str, variables: Mapping[str, Variable] = VARIABLES) -> None:
        self.expression = expression
        if len(expression) > MAX_CHARACTERS:
            raise GuardError(f"a guard has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
        try:
            tree = parse(expression)
            self._evaluate = compile_tree(tree, expression)
        except ExpressionError as error:
            fix = f"; {error.fix}" if error.fix else ""
            place = f"guard `{around(expression, error.offset)}`, column {error.offset + 1}"
            raise GuardError(brief(f"{place}: {error}{fix}")) from error
        self.names = frozenset(node.name for node in tree.walk() if isinstance(node, Name)) & frozenset(variables)
        """The variables that it reads."""
        self._looping_tree = tree if is_looping(tree) else None
        """The tree, if the work depends on the sizes of the variables."""

    def evaluate(self, context: Mapping[str, Any]) -> bool:
        """Return whether the guard holds.

        Args:
            context: A mapping for each variable in `names`.

        Raises:
            GuardError: a field is missing, types do not fit, the work exceeds `MAX_WORK`, or the result is not a bool.
        """
        value = self.value(context)
        if value is True or value is False:
            return bool(value)
        raise GuardError(
            f"guard `{around(self.expression, 0)}` returns {brief(repr(value))} instead of true or false; compare it"
        )

    def value(self, context: Mapping[str, Any]) -> Any:
        """Return the expression's value, of any type.

        Raises:
            GuardError: a field is missing, types do not fit, or the work exceeds `MAX_WORK`.
        """
        if self._looping_tree is not None:
            work = work_of(self._looping_tree, sizes_of(context.values()))
            if work > MAX_WORK:
                raise GuardError(
                    f"guard `{around(self.expression, 0)}`: it may take {work:,} steps on these values; {MAX_WORK:,} "
                    "are allowed. Nest fewer loops, or shorten the lists that it loops over"
                )
        try:
            return self._evaluate(context)
        except EvaluationError as error:
            raise GuardError(f"guard `{around(self.expression, 0)}`: {error}") from error
        except RecursionError as error:
            raise GuardError(
                f"guard `{around(self.expression, 0)}`: a value is nested too deeply to be compared"
            ) from error

    def __repr__(self) -> str:
        return f"Guard({self.expression!r})"


def guard_problems(expression: str, variables: Mapping[str, Variable] = VARIABLES) -> list[GuardProblem]:
    """Return everything that is wrong with an expression and can be found without evaluating it, by column.

    Syntax errors; variables, fields and functions that do not exist, with the nearest name that does; types that do not
    fit; a result that is not a bool; loops that may take too long.
    """
    if len(expression) > MAX_CHARACTERS:
        return [
            GuardProblem(
                message=f"{len(expression)} characters; at most {MAX_CHARACTERS} are allowed",
                column=1,
                fix="write a shorter guard",
                kind="parse",
            )
        ]
    try:
        tree = parse(expression)
    except ExpressionError as error:
        return [GuardProblem(message=str(error), column=error.offset + 1, fix=error.fix, kind="parse")]
    inference = TypeInference(expression, variables)
    types = inference.types(tree)
    problems = inference.problems
    if types.isdisjoint(BOOL | DYN):
        problems.append(
            GuardProblem(
                message=f"a guard must be true or false; this is {describe(types)}",
                column=tree.start + 1,
                fix="compare it" if types <= NUMBERS | STRING else None,
                kind="not-boolean",
            )
        )
    if is_looping(tree) and (work := work_of(tree, ASSUMED_SIZES)) > MAX_WORK:
        steps = f"{work:,}" if work < 10**12 else "more than 10¹²"
        problems.append(
            GuardProblem(
                message=f"with lists of {ASSUMED_SIZES.length} elements it may take {steps} steps; "
                f"{MAX_WORK:,} are allowed",
                column=tree.start + 1,
                fix="nest fewer loops, or let the environment compute a fact",
                kind="too-costly",
            )
        )
    return sorted(problems, key=lambda problem: problem.column)
