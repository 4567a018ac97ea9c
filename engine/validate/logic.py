"""What can be proved about guards: whether one always holds, never holds, implies another or overlaps with it.

A guard becomes a function of the quantities that it compares with constants (`turns.user < 3`, `last.finish == "stop"`,
`feedback.solved`), and is evaluated on enough values of each quantity to cover every outcome: the constants, and one
value between each two. The spec's limits are constants. Arithmetic over counters is computed where their ranges are
small, which is always so where they are counted exactly. A comparison of two other expressions may have any result.

A proof is certain. What is not proved may still be true, because quantities are taken as independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from math import ceil, floor, inf, isfinite, prod
from typing import Any

from engine.machine.evaluate import EvaluationError, compile_tree
from engine.machine.expression import Constant, ExpressionError, Index, ListOf, Name, Node, Operation, Select, parse
from engine.machine.guards import MAX_CHARACTERS
from engine.machine.operators import NUMBERS, OPERATORS, equal, type_name
from engine.machine.variables import VARIABLES

MAX_CASES = 1024
"""Combinations of values on which a guard is evaluated; of one that needs more, nothing is proved."""
MAX_VALUES = 32
"""Values of a counter that are tried one by one, for arithmetic."""

Range = tuple[float, float]
Ranges = Mapping[str, Range]
"""The least and the greatest value of quantities, both included."""
Case = Mapping[str, Any]
"""A value for each quantity."""
Predicate = Callable[[Case], bool | None]
"""The guard's result in one case; None if it has none."""

ANY_NUMBER: Range = (-inf, inf)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_FINISHES = frozenset({"", "stop", "length", "abort"})
_TYPES = {f"{name}.{key}": member.types for name, item in VARIABLES.items() for key, member in item.fields.items()}
_INTEGERS = frozenset(key for key, types in _TYPES.items() if types == {"int"})
_NUMERIC = frozenset(key for key, types in _TYPES.items() if types <= NUMBERS)
_OTHER = object()
"""A value that equals no constant."""


@dataclass(frozen=True)
class Formula:
    """A guard as a function of its quantities, under given limits."""

    expression: str
    limits: tuple[tuple[str, float], ...] = ()
    known: bool = field(default=True, compare=False)
    """False if the guard cannot be read: then nothing is proved about it."""
    result: Predicate = field(default=lambda case: True, compare=False, repr=False)
    constants: Mapping[str, frozenset[tuple[str, Any]]] = field(default_factory=dict, compare=False, repr=False)
    """What each quantity is compared with: (type, value)."""
    pairs: Mapping[str, frozenset[str] | None] = field(default_factory=dict, compare=False, repr=False)
    """Comparisons of two expressions, and the counters from which they can be computed; None: they cannot."""

    def truth(self, ranges: Ranges) -> bool | None:
        """True or False if the guard always has this result within the ranges; None if that is not proved."""
        truths: set[bool | None] = set()
        for case in _cases((self,), ranges):
            truths.add(self.result(case))
            if len(truths) > 1:
                return None
        return truths.pop() if truths else None

    @property
    def reads(self) -> frozenset[str]:
        """The quantities on which its result depends."""
        return frozenset(self.constants).union(*(keys for keys in self.pairs.values() if keys is not None))

    @property
    def weight(self) -> int:
        """About how many comparisons `truth` makes."""
        cases: int = 3 ** len(self.pairs) * prod(2 * len(values) + 1 for values in self.constants.values())
        return 1 + min(cases, MAX_CASES) * (len(self.constants) + len(self.pairs))


UNKNOWN = Formula("", known=False, result=lambda case: None)
ALWAYS = Formula("true")


@lru_cache(maxsize=8192)
def formula(expression: str, limits: tuple[tuple[str, float], ...] = ()) -> Formula:
    """Return a guard as a function of its quantities; `UNKNOWN` if it is not valid CEL.

    Args:
        expression: The guard.
        limits: The value of each `limits.*`.
    """
    if len(expression) > MAX_CHARACTERS:
        return UNKNOWN
    reader = _Reader(expression, limits)
    try:
        result = reader.predicate(parse(expression))
    except ExpressionError:
        return UNKNOWN
    return Formula(
        expression,
        limits,
        True,
        result,
        {key: frozenset(values) for key, values in reader.constants.items()},
        reader.pairs,
    )


def overlap(first: Formula, second: Formula, ranges: Ranges) -> bool:
    """Whether both guards certainly hold at once in some case. False if that is not proved."""
    if first.pairs or second.pairs:
        return False
    return any(first.result(case) is True and second.result(case) is True for case in _cases((first, second), ranges))


def implies(first: Formula, second: Formula, ranges: Ranges) -> bool:
    """Whether `second` certainly holds in every case in which `first` does. False if that is not proved."""
    tried = False
    for case in _cases((first, second), ranges):
        tried = True
        if first.result(case) is not False and second.result(case) is not True:
            return False
    return tried


def _cases(formulas: tuple[Formula, ...], ranges: Ranges) -> Iterator[Case]:
    """Cases that cover every outcome; none if there are too many, or a formula is not known."""
    if not all(formula.known for formula in formulas):
        return
    constants: dict[str, frozenset[tuple[str, Any]]] = {}
    domains: dict[str, list[Any]] = {}
    for formula in formulas:
        for key, values in formula.constants.items():
            constants[key] = constants.get(key, frozenset()) | values
        for pair, keys in formula.pairs.items():
            spans = {key: ranges.get(key, ANY_NUMBER) for key in keys or ()}
            if keys is None or any(high - low >= MAX_VALUES for low, high in spans.values()):
                domains[pair] = [-1, 0, 1]
            else:
                domains |= {key: list(range(ceil(low), floor(high) + 1)) for key, (low, high) in spans.items()}
    for key, values in constants.items():
        if key not in domains:
            domains[key] = _values(key, values, ranges.get(key, ANY_NUMBER))
    if prod(map(len, domains.values())) <= MAX_CASES:
        for values_of_case in product(*domains.values()):
            yield dict(zip(domains, values_of_case, strict=True))


def _values(key: str, constants: frozenset[tuple[str, Any]], limits: Range) -> list[Any]:
    """Values of a quantity that cover every outcome of its comparisons with constants."""
    if key == "last.finish":
        return sorted(_FINISHES)
    low, high = limits
    others = [value for kind, value in constants if kind not in NUMBERS]
    numbers = {value for kind, value in constants if kind in NUMBERS}
    values: list[Any] = []
    if numbers:
        tried = {end for end in limits if isfinite(end)}
        if key in _INTEGERS:
            tried |= {near for value in numbers for near in range(ceil(value) - 1, floor(value) + 2)}
            values = sorted(int(value) for value in tried if low <= value <= high)
        else:
            points = sorted(numbers | tried)
            tried = {*points, *(sum(ends) / 2 for ends in pairwise(points)), points[0] - 1, points[-1] + 1}
            values = sorted(value for value in tried if low <= value <= high)
    if others:
        values += others
        if not all(isinstance(value, bool) for value in others):
            values.append(_OTHER)
    return values


class _Reader:
    """Turns a tree into a predicate, and collects what it compares."""

    def __init__(self, text: str, limits: tuple[tuple[str, float], ...]) -> None:
        self.text = text
        self.limits = {name: int(value) if f"limits.{name}" in _INTEGERS else value for name, value in limits}
        self.constants: dict[str, set[tuple[str, Any]]] = {}
        self.pairs: dict[str, frozenset[str] | None] = {}

    def predicate(self, node: Node) -> Predicate:
        """The result of a node that is a condition."""
        if isinstance(node, Constant) and node.type == "bool":
            constant = bool(node.value)
            return lambda case: constant
        if isinstance(node, Operation):
            if node.operator in ("&&", "||"):
                return _junction([self.predicate(arg) for arg in node.args], decisive=node.operator == "||")
            if node.operator == "!":
                inner = self.predicate(node.args[0])
                return lambda case: None if (found := inner(case)) is None else not found
            if node.operator == "?:":
                test, then, other = (self.predicate(arg) for arg in node.args)
                return lambda case: None if (found := test(case)) is None else then(case) if found else other(case)
            if node.operator in _FLIPPED:
                return self.comparison(node.operator, *node.args)
            if node.operator == "in" and isinstance(node.args[1], ListOf):
                return _junction(
                    [self.comparison("==", node.args[0], item) for item in node.args[1].items], decisive=True
                )
        key = self.key(node)
        self.constants.setdefault(key, set()).update((("bool", True), ("bool", False)))
        return lambda case: case[key] if isinstance(case[key], bool) else None

    def comparison(self, operator: str, left: Node, right: Node) -> Predicate:
        """A comparison, with a constant on its right if there is one."""
        known = self.constant(left)
        if known is not None:
            left, right, operator = right, left, _FLIPPED[operator]
        constant = self.constant(right) if known is None else known
        other = self.constant(left)
        if constant is not None and other is not None:
            settled = _compare(operator, other[0], constant[0])
            return lambda case: settled
        arithmetic = isinstance(left, Operation) and self.counters(left) is not None
        if constant is None or arithmetic or (operator not in ("==", "!=") and type_name(constant[0]) not in NUMBERS):
            return self.pair(operator, left, right)
        value = constant[0]
        if isinstance(value, bool):
            inner = self.predicate(left)
            return lambda case: None if (found := inner(case)) is None else (found == value) == (operator == "==")
        key = self.key(left)
        self.constants.setdefault(key, set()).add((type_name(value), value))
        return lambda case: _compare(operator, case[key], value)

    def pair(self, operator: str, left: Node, right: Node) -> Predicate:
        """A comparison of two expressions: computed from counters, or any of less, equal and greater."""
        if self.key(left) > self.key(right):
            left, right, operator = right, left, _FLIPPED[operator]
        name = f"{self.key(left)} <> {self.key(right)}"
        counters = self.counters(left), self.counters(right)
        computable = counters[0] is not None and counters[1] is not None
        self.pairs[name] = counters[0] | counters[1] if counters[0] is not None and counters[1] is not None else None
        sides = [compile_tree(side, self.text) for side in (left, right)] if computable else []

        def result(case: Case) -> bool | None:
            sign = case.get(name)
            if sign is not None:
                return _compare(operator, sign, 0)
            try:
                return _compare(operator, *(side(self.scope(case)) for side in sides))
            except EvaluationError:
                return None

        return result

    def scope(self, case: Case) -> dict[str, Any]:
        """The guard variables of a case: its counters, and the limits."""
        scope: dict[str, Any] = {"limits": self.limits}
        for key, value in case.items():
            if key in _NUMERIC:
                variable, _, name = key.partition(".")
                scope.setdefault(variable, {})[name] = value
        return scope

    def constant(self, node: Node) -> tuple[Any] | None:
        """The value of a node that reads nothing but limits."""
        if isinstance(node, Constant):
            return (node.value,)
        if self.counters(node) == frozenset():
            try:
                return (compile_tree(node, self.text)({"limits": self.limits}),)
            except EvaluationError:
                return None
        return None

    def counters(self, node: Node) -> frozenset[str] | None:
        """The counters from which a number is computed; None if it depends on anything else."""
        if isinstance(node, Constant):
            return frozenset() if node.type in NUMBERS else None
        if isinstance(node, Operation) and node.operator in ("+", "-", "*", "/", "%"):
            parts = [self.counters(arg) for arg in node.args]
            present = [part for part in parts if part is not None]
            return frozenset().union(*present) if len(present) == len(parts) else None
        if not isinstance(node, Select) or node.test:
            return None
        key = self.key(node)
        if key.removeprefix("limits.") in self.limits and key.startswith("limits."):
            return frozenset()
        return frozenset({key}) if key in _INTEGERS and not key.startswith("limits.") else None

    def key(self, node: Node) -> str:
        """One name for a quantity, whichever way it is written."""
        if isinstance(node, Name):
            return node.name
        if isinstance(node, Select) and not node.test:
            return f"{self.key(node.of)}.{node.field}"
        if isinstance(node, Index) and isinstance(node.key, Constant) and node.key.type == "string":
            return f"{self.key(node.of)}.{node.key.value}"
        words = " ".join(self.text[node.start : node.end].split())
        return f"has({words})" if isinstance(node, Select) else words


def _junction(parts: list[Predicate], *, decisive: bool) -> Predicate:
    """`||` (a part that is true decides) or `&&` (one that is false does)."""

    def result(case: Case) -> bool | None:
        missing = False
        for part in parts:
            found = part(case)
            if found is decisive:
                return decisive
            missing = missing or found is None
        return None if missing else not decisive

    return result


def _compare(operator: str, left: Any, right: Any) -> bool | None:
    if operator in ("==", "!="):
        return equal(left, right) == (operator == "==")
    function = OPERATORS[operator]
    return bool(function.compute(left, right)) if (type_name(left), type_name(right)) in function.overloads else None
