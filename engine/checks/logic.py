"""Whether a guard can hold, and whether two can hold at once: enough logic for what guards say.

A guard becomes a disjunction of conjunctions of comparisons, each of one quantity with one constant: `turns.user < 3`,
`last.finish == "stop"`, `feedback.solved`. The spec's limits are constants. Whatever else an expression says (functions,
list macros) is an unknown truth with a name of its own.

Invariant: `unsatisfiable` is certain. What is called satisfiable may still never happen, because quantities are
taken as independent of each other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, floor, inf, isfinite

from engine.machine.expression import Constant, ExpressionError, Index, ListOf, Name, Node, Operation, Select, parse
from engine.machine.guards import MAX_CHARACTERS
from engine.machine.variables import VARIABLES

MOST_CLAUSES = 256
"""Conjunctions that one guard may come to; of a guard with more, nothing is said."""
MOST_LITERALS = 4096
"""Comparisons that all its conjunctions together may come to."""

Range = tuple[float, float]
Ranges = Mapping[str, Range]
"""What is known of quantities, both ends included."""
Value = bool | float | str | None
Linear = tuple[tuple[str, float], ...]
"""Quantities and their factors."""

ANYTHING: Range = (-inf, inf)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_NEGATED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}
_TEXTS = {"last.finish": frozenset({"", "stop", "length", "abort"})}
"""Texts that are one of a few."""


@dataclass(frozen=True, slots=True)
class Literal:
    """One comparison of a quantity with a constant."""

    key: str
    operator: str
    value: Value
    linear: Linear = ()
    """For numbers: what the key is made of."""
    whole: bool = False
    """The quantity is a whole number."""

    @property
    def numeric(self) -> bool:
        """Whether the quantity is compared with a number."""
        return bool(self.linear)

    @property
    def sure(self) -> bool:
        """Whether it speaks of one quantity alone, so that taking quantities as independent loses nothing."""
        return len(self.linear) <= 1


Clause = tuple[Literal, ...]
Clauses = tuple[Clause, ...]


class TooMany(Exception):
    """A guard comes to more clauses than are looked at."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A guard, and its negation, as clauses; None where it says too much to be looked at."""

    holds: Clauses | None
    fails: Clauses | None

    def truth(self, ranges: Ranges) -> bool | None:
        """True or False where it is always so within the ranges; None where that is not known."""
        if self.holds is not None and not any(satisfiable(clause, ranges) for clause in self.holds):
            return False
        if self.fails is not None and not any(satisfiable(clause, ranges) for clause in self.fails):
            return True
        return None

    def literals(self) -> Iterator[Literal]:
        """Every comparison in it, and in its negation."""
        for clause in (*(self.holds or ()), *(self.fails or ())):
            yield from clause

    @property
    def sure(self) -> bool:
        """Whether every comparison in it is of one quantity."""
        return self.holds is not None and all(literal.sure for literal in self.literals())

    @property
    def weight(self) -> int:
        """How many comparisons there are to look at."""
        return 1 + sum(len(clause) for clauses in (self.holds, self.fails) for clause in clauses or ())


UNKNOWN = Formula(None, None)
ALWAYS = Formula(((),), ())


@lru_cache(maxsize=8192)
def formula(expression: str, limits: tuple[tuple[str, float], ...] = ()) -> Formula:
    """A guard as clauses, given the values of `limits.*`. What cannot be read is unknown."""
    if len(expression) > MAX_CHARACTERS:
        return UNKNOWN
    try:
        tree = parse(expression)
    except ExpressionError:
        return UNKNOWN
    reader = _Reader(expression, dict(limits))
    return Formula(_attempt(reader.clauses, tree, True), _attempt(reader.clauses, tree, False))


def _attempt(clauses: Callable[[Node, bool], Clauses], tree: Node, wanted: bool) -> Clauses | None:
    try:
        return clauses(tree, wanted)
    except TooMany:
        return None


def overlap(first: Formula, second: Formula, ranges: Ranges) -> bool:
    """Whether both may hold at once. False where that is not known."""
    if not (first.sure and second.sure) or first.holds is None or second.holds is None:
        return False
    return any(satisfiable((*a, *b), ranges) for a, b in product(first.holds, second.holds))


def implies(first: Formula, second: Formula, ranges: Ranges) -> bool:
    """Whether `second` certainly holds wherever `first` does."""
    if first.holds is None or second.fails is None:
        return False
    return not any(satisfiable((*a, *b), ranges) for a, b in product(first.holds, second.fails))


def satisfiable(clause: Iterable[Literal], ranges: Ranges) -> bool:
    """Whether comparisons can hold together."""
    by_key: dict[str, list[Literal]] = {}
    for literal in clause:
        by_key.setdefault(literal.key, []).append(literal)
    return all(_possible(literals, ranges) for literals in by_key.values())


def _possible(literals: list[Literal], ranges: Ranges) -> bool:
    numbers = [literal for literal in literals if literal.numeric]
    others = [literal for literal in literals if not literal.numeric]
    if numbers and any(literal.operator == "==" for literal in others):
        return False  # a number and not a number
    return (not numbers or _number_exists(numbers, ranges)) and (not others or _other_exists(others))


def _number_exists(literals: list[Literal], ranges: Ranges) -> bool:
    low, high = _range(literals[0].linear, ranges)
    whole = literals[0].whole
    open_low = open_high = False
    excluded: set[float] = set()
    for literal in literals:
        value = float(literal.value)  # type: ignore[arg-type]
        operator = literal.operator
        if operator == "!=":
            excluded.add(value)
            continue
        if operator in (">", ">=", "==") and (value > low or (value == low and operator == ">")):
            low, open_low = value, operator == ">"
        if operator in ("<", "<=", "==") and (value < high or (value == high and operator == "<")):
            high, open_high = value, operator == "<"
    if whole:
        return _whole_exists(low, high, open_low, open_high, excluded)
    if low < high:
        return True
    return low == high and not open_low and not open_high and low not in excluded


def _whole_exists(low: float, high: float, open_low: bool, open_high: bool, excluded: set[float]) -> bool:
    first = low if low == -inf else floor(low) + 1 if open_low else ceil(low)
    last = high if high == inf else ceil(high) - 1 if open_high else floor(high)
    if first == -inf or last == inf:
        return first <= last
    return first <= last and last - first + 1 > sum(
        first <= value <= last and value == int(value) for value in excluded
    )


def _range(linear: Linear, ranges: Ranges) -> Range:
    low = high = 0.0
    for term, factor in linear:
        least, most = ranges.get(term, ANYTHING)
        ends = (factor * least, factor * most)
        low, high = low + min(ends), high + max(ends)
    return low, high


def _other_exists(literals: list[Literal]) -> bool:
    equal = {_exact(literal.value) for literal in literals if literal.operator == "=="}
    unequal = {_exact(literal.value) for literal in literals if literal.operator == "!="}
    if equal:
        return len(equal) == 1 and not equal & unequal and _allowed(literals[0].key, equal)
    if {_exact(True), _exact(False)} <= unequal:
        return literals[0].key not in _BOOLEANS and not literals[0].key.startswith("?")
    known = _TEXTS.get(literals[0].key)
    return known is None or not {_exact(text) for text in known} <= unequal


def _allowed(key: str, equal: set[tuple[str, Value]]) -> bool:
    known = _TEXTS.get(key)
    return known is None or equal <= {_exact(text) for text in known}


def _exact(value: Value) -> tuple[str, Value]:
    """True is not 1."""
    return type(value).__name__, value


_TYPES = {f"{name}.{key}": member.types for name, item in VARIABLES.items() for key, member in item.fields.items()}
_BOOLEANS = frozenset(key for key, types in _TYPES.items() if types == {"bool"})
_WHOLE = frozenset(key for key, types in _TYPES.items() if types == {"int"})
_NUMBERS = frozenset(key for key, types in _TYPES.items() if types <= {"int", "double"})


class _Reader:
    """From a tree to clauses."""

    def __init__(self, text: str, limits: Mapping[str, float]) -> None:
        self.text = text
        self.limits = limits

    def clauses(self, node: Node, wanted: bool) -> Clauses:
        """Those of a node being true (or, not `wanted`, false)."""
        if isinstance(node, Operation):
            if node.operator == "!":
                return self.clauses(node.args[0], not wanted)
            if node.operator in ("&&", "||"):
                parts = [self.clauses(part, wanted) for part in node.args]
                return _all(parts) if (node.operator == "&&") == wanted else _any(parts)
            if node.operator == "?:":
                test, then, other = node.args
                taken = _all([self.clauses(test, True), self.clauses(then, wanted)])
                return _any([taken, _all([self.clauses(test, False), self.clauses(other, wanted)])])
            if node.operator in _FLIPPED:
                return self.compared(node.operator if wanted else _NEGATED[node.operator], *node.args)
            if node.operator == "in" and isinstance(node.args[1], ListOf):
                parts = [self.compared("==" if wanted else "!=", node.args[0], item) for item in node.args[1].items]
                return _any(parts) if wanted else _all(parts)
        if isinstance(node, Constant) and node.type == "bool":
            return ((),) if (node.text == "true") == wanted else ()
        return ((self.truth(node, wanted),),)

    def truth(self, node: Node, wanted: bool) -> Literal:
        """An expression that is itself true or false."""
        key = self.key(node)
        # With a name of its own: an unknown truth is a boolean, whatever else the same words may be compared with.
        return Literal(key if key in _BOOLEANS else f"?{key}", "==" if wanted else "!=", True)

    def compared(self, operator: str, left: Node, right: Node) -> Clauses:
        """A comparison, with whatever is constant on its right."""
        a, b = self.constant(left), self.constant(right)
        if (a is not None or b is not None) and not self.number(left) and not self.number(right):
            if a is not None and b is not None:
                return self.settled(operator, a[0], b[0])
            if a is not None:
                left, b, operator = right, a, _FLIPPED[operator]
            assert b is not None
            if operator in ("==", "!="):
                return self.equal(operator, left, b[0])
        elif self.number(left) or self.number(right):
            first, second = self.linear(left), self.linear(right)
            if first is not None and second is not None:
                return self.numbers(operator, first, second)
        if operator in ("==", "!="):
            names = sorted((self.key(left), self.key(right)))
            return ((Literal(f"?{names[0]} == {names[1]}", "==" if operator == "==" else "!=", True),),)
        key = f"?{self.key(left)} {operator} {self.key(right)}"
        opposite = f"?{self.key(left)} {_NEGATED[operator]} {self.key(right)}"
        chosen, value = (key, True) if key < opposite else (opposite, False)
        return ((Literal(chosen, "==" if value else "!=", True),),)

    def equal(self, operator: str, left: Node, value: Value) -> Clauses:
        if isinstance(value, bool):
            return self.clauses(left, (operator == "==") == value)
        return ((Literal(self.key(left), operator, value),),)

    @staticmethod
    def settled(operator: str, a: Value, b: Value) -> Clauses:
        """Two constants that are no numbers."""
        if operator in ("==", "!="):
            return ((),) if (_exact(a) == _exact(b)) == (operator == "==") else ()
        if isinstance(a, str) and isinstance(b, str):
            holds = {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[operator]
            return ((),) if holds else ()
        return ((Literal(f"?{a!r} {operator} {b!r}", "==", True),),)

    @staticmethod
    def numbers(operator: str, left: _Sum, right: _Sum) -> Clauses:
        """A comparison of two sums, as one of a sum with a constant."""
        terms = {term: left.terms.get(term, 0.0) - right.terms.get(term, 0.0) for term in {**left.terms, **right.terms}}
        linear = tuple(sorted((term, factor) for term, factor in terms.items() if factor))
        value = right.constant - left.constant
        if not all(isfinite(number) for number in (value, *terms.values())):
            raise TooMany
        if not linear:
            holds = {"<": value > 0, "<=": value >= 0, ">": value < 0, ">=": value <= 0, "==": value == 0}
            return ((),) if (value != 0 if operator == "!=" else holds[operator]) else ()
        first = linear[0][1]
        if first < 0:
            operator = _FLIPPED[operator]
        linear, value = tuple((term, factor / first) for term, factor in linear), value / first
        whole = all(term in _WHOLE and factor == int(factor) for term, factor in linear)
        key = " + ".join(term if factor == 1 else f"{factor:g} * {term}" for term, factor in linear)
        return ((Literal(key, operator, value, linear, whole),),)

    def constant(self, node: Node) -> tuple[Value] | None:
        """A literal that is no number."""
        if not isinstance(node, Constant) or node.type not in ("bool", "string", "null"):
            return None
        if node.type == "string":
            try:
                return (str(ast.literal_eval(node.text)),)
            except (ValueError, SyntaxError):
                return (node.text,)
        return (None if node.type == "null" else node.text == "true",)

    def number(self, node: Node) -> bool:
        """Whether this is certainly a number."""
        if isinstance(node, Constant):
            return node.type in ("int", "uint", "double")
        if isinstance(node, Operation) and node.operator in ("+", "-", "*", "/", "%"):
            return any(self.number(part) for part in node.args)
        key = self.key(node)
        return key in _NUMBERS or key.startswith("size(")

    def linear(self, node: Node) -> _Sum | None:
        """A number as a sum of quantities; None where it cannot be one."""
        if isinstance(node, Constant):
            return _Sum({}, _literal(node.text)) if node.type in ("int", "uint", "double") else None
        if isinstance(node, Operation) and node.operator in ("+", "-", "*"):
            parts = [self.linear(part) for part in node.args]
            if all(part is not None for part in parts):
                whole = [part for part in parts if part is not None]
                found = _combined(node.operator, whole)
                if found is not None:
                    return found
        key = self.key(node)
        if key.startswith("limits.") and key.removeprefix("limits.") in self.limits:
            return _Sum({}, self.limits[key.removeprefix("limits.")])
        return _Sum({key: 1.0}, 0.0)

    def key(self, node: Node) -> str:
        """One name for the same quantity, however it is written."""
        if isinstance(node, Name):
            return node.name
        if isinstance(node, Select) and not node.test:
            return f"{self.key(node.of)}.{node.field}"
        if isinstance(node, Index) and isinstance(node.key, Constant) and node.key.type == "string":
            return f"{self.key(node.of)}.{node.key.text[1:-1]}"
        words = " ".join(self.text[node.start : node.end].split())
        return f"has({words})" if isinstance(node, Select) else words


@dataclass(frozen=True, slots=True)
class _Sum:
    terms: dict[str, float]
    constant: float


def _combined(operator: str, parts: list[_Sum]) -> _Sum | None:
    if operator == "*":
        first, second = parts
        if first.terms and second.terms:
            return None
        scale, other = (first.constant, second) if not first.terms else (second.constant, first)
        return _Sum({term: factor * scale for term, factor in other.terms.items()}, other.constant * scale)
    if len(parts) == 1:  # a minus sign
        return _Sum({term: -factor for term, factor in parts[0].terms.items()}, -parts[0].constant)
    sign = 1.0 if operator == "+" else -1.0
    first, second = parts
    terms = dict(first.terms)
    for term, factor in second.terms.items():
        terms[term] = terms.get(term, 0.0) + sign * factor
    return _Sum(terms, first.constant + sign * second.constant)


def _literal(text: str) -> float:
    text = text.rstrip("uU")
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return float(sign * int(digits, 16)) if digits.lower().startswith("0x") else float(text)


def _all(parts: list[Clauses]) -> Clauses:
    found: Clauses = ((),)
    for part in parts:
        if len(found) * len(part) > MOST_CLAUSES:
            raise TooMany
        found = _bounded(tuple((*a, *b) for a, b in product(found, part)))
    return found


def _any(parts: list[Clauses]) -> Clauses:
    return _bounded(tuple(clause for part in parts for clause in part))


def _bounded(found: Clauses) -> Clauses:
    if len(found) > MOST_CLAUSES or sum(map(len, found)) > MOST_LITERALS:
        raise TooMany
    return found
