"""A table: the operators and functions of guards, with the types they take, what they return, and how they compute it.

The type check before a run and the evaluation during it read the same tables, so both accept the same operand types.
Semantics: Common Expression Language specification, "List of Standard Definitions". Numbers of different types can be
compared and are not mixed in arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from itertools import product
from math import copysign, isfinite, nan
from typing import Any

from engine.schemas.base import Struct

NUMBERS = frozenset({"int", "double"})
TYPE_NAMES = frozenset({"bool", "double", "int", "list", "map", "null_type", "string", "type"})
"""Names that an expression may compare with the result of `type(x)`."""

Overloads = Mapping[tuple[str, ...], str]
"""Types of the operands (a method's target first) to the type of the result."""


class TypeName(str):
    """The value of `type(x)`; never equal to a string."""

    __slots__ = ()


class Function(Struct, frozen=True, kw_only=True):
    """An operator or a function."""

    overloads: Overloads
    compute: Callable[..., Any]
    """Takes operands of these types. Raises ValueError or ArithmeticError for values without a result."""
    as_method: bool = False
    as_function: bool = False


def type_name(value: object) -> str:
    """Return the name of a value's CEL type; for a value of any other Python type, that type's name."""
    name = _SCALARS.get(type(value))
    if name is not None:
        return name
    for kind, name in _SCALARS.items():  # subclasses, such as those of `enum`
        if isinstance(value, kind):
            return name
    if isinstance(value, Mapping):
        return "map"
    return "list" if isinstance(value, list | tuple) else type(value).__name__


_SCALARS: dict[type, str] = {
    TypeName: "type", bool: "bool", int: "int", float: "double", str: "string", type(None): "null",
}  # fmt: skip


def equal(left: Any, right: Any) -> bool:
    """Compare two values of any type: 1 equals 1.0 and does not equal true; lists and maps are compared by element."""
    if type(left) is type(right) and type(left) in _SCALARS:
        return bool(left == right)
    kinds = type_name(left), type_name(right)
    if kinds == ("list", "list"):
        return len(left) == len(right) and all(map(equal, left, right))
    if kinds == ("map", "map"):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return (kinds[0] == kinds[1] or NUMBERS.issuperset(kinds)) and bool(left == right)


def contains(item: Any, values: Any) -> bool:
    """Whether a list has an element that equals the item, or a map has it as a key."""
    if isinstance(values, Mapping):
        return isinstance(item, str) and item in values
    return any(equal(item, value) for value in values)


def _arithmetic(compute: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*operands: Any) -> Any:
        result = compute(*operands)
        if isinstance(result, int) and not -(2**63) <= result < 2**63:
            raise OverflowError("the result does not fit into 64 bits")
        return result

    return checked


def _add(left: Any, right: Any) -> Any:
    return [*left, *right] if isinstance(left, list | tuple) else left + right


def _divide(left: Any, right: Any) -> Any:
    """Integers are rounded towards zero; doubles follow IEEE 754."""
    if isinstance(left, int):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    if right == 0:
        return nan if left == 0 or left != left else copysign(float("inf"), left) * copysign(1.0, right)
    return left / right


def _to_number(kind: type[int | float], value: Any) -> int | float:
    """A double is rounded towards zero; Python reads more texts as numbers than CEL."""
    if isinstance(value, str) and (value != value.strip() or "_" in value):
        raise ValueError(f"{value!r} is not a number")
    return kind(value)


def _to_string(value: Any) -> str:
    """A double without an exponent, and without `.0`."""
    if isinstance(value, float) and isfinite(value):
        return format(Decimal(repr(value)).normalize(), "f")
    return str(value)


def _matches(text: str, pattern: str) -> bool:
    """Search with RE2, whose time is linear in the text; Python's `re` can take for ever on a reply of the model."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())


_TWO_STRINGS: Overloads = {("string", "string"): "bool"}
_TWO_NUMBERS: Overloads = {(name, name): name for name in NUMBERS}
_TO_ADD: Overloads = {**_TWO_NUMBERS, ("string", "string"): "string", ("list", "list"): "list"}
_CONVERTED = [("int",), ("double",), ("string",)]
"""Types of the one operand of a conversion."""
_COMPARED: Overloads = dict.fromkeys((*product(NUMBERS, NUMBERS), ("string", "string"), ("bool", "bool")), "bool")

OPERATORS: Mapping[str, Function] = {
    "+": Function(overloads=_TO_ADD, compute=_arithmetic(_add)),
    "-": Function(overloads=_TWO_NUMBERS, compute=_arithmetic(operator.sub)),
    "*": Function(overloads=_TWO_NUMBERS, compute=_arithmetic(operator.mul)),
    "/": Function(overloads=_TWO_NUMBERS, compute=_arithmetic(_divide)),
    "%": Function(overloads={("int", "int"): "int"}, compute=lambda left, right: left - right * _divide(left, right)),
    "<": Function(overloads=_COMPARED, compute=operator.lt),
    "<=": Function(overloads=_COMPARED, compute=operator.le),
    ">": Function(overloads=_COMPARED, compute=operator.gt),
    ">=": Function(overloads=_COMPARED, compute=operator.ge),
}
"""Operators with two operands whose types must fit; `==`, `!=` and `in` take any types."""

NEGATION = Function(overloads={("int",): "int", ("double",): "double"}, compute=_arithmetic(operator.neg))
"""The minus sign."""

FUNCTIONS: Mapping[str, Function] = {
    "size": Function(
        overloads={("string",): "int", ("list",): "int", ("map",): "int"}, compute=len, as_method=True, as_function=True
    ),
    "contains": Function(overloads=_TWO_STRINGS, compute=operator.contains, as_method=True),
    "startsWith": Function(overloads=_TWO_STRINGS, compute=str.startswith, as_method=True),
    "endsWith": Function(overloads=_TWO_STRINGS, compute=str.endswith, as_method=True),
    "matches": Function(overloads=_TWO_STRINGS, compute=_matches, as_method=True),
    "int": Function(
        overloads=dict.fromkeys(_CONVERTED, "int"),
        compute=_arithmetic(partial(_to_number, int)),
        as_function=True,
    ),
    "double": Function(
        overloads=dict.fromkeys(_CONVERTED, "double"), compute=partial(_to_number, float), as_function=True
    ),
    "string": Function(overloads=dict.fromkeys(_CONVERTED, "string"), compute=_to_string, as_function=True),
}
"""Functions besides `has`, `type` and the macros `all`, `exists`, `exists_one`, `filter` and `map`."""


def cannot_apply(name: str, operands: Iterable[tuple[str, str]]) -> tuple[str, str | None]:
    """Return the message and the fix for operands whose types do not fit.

    Args:
        name: The operator or function.
        operands: Each operand's text and the name of its type.
    """
    listed = list(operands)
    message = f"`{name}` cannot be applied to {' and '.join(f'`{text}` ({kind})' for text, kind in listed)}"
    mixed = len(listed) == 2 and all(NUMBERS.intersection(kind.split(" or ")) for _, kind in listed)
    return message, "convert one of them: `int(x)`, `double(x)`" if mixed else None
