"""A calculator tool: it computes exactly, always ends quickly, and never runs code.

Invariant: every value is a `Fraction`, and no operation begins whose result could exceed `MAX_BITS`. So a
rounded answer is always marked as rounded, and hostile input (`9**9**9`) is refused before it costs CPU time.

The text is split into tokens and its grammar is checked here, with messages that say how to fix it. Then `ast`
parses it with every number replaced by a name, and this module evaluates the tree. Python's `eval` is not used.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 400
"""Maximum number of characters of one expression."""
MAX_NESTING = 40
"""Maximum depth of parentheses, and maximum number of signs in a row."""
MAX_BITS = 3300
"""Maximum bits of a numerator or denominator: a little under 1,000 decimal digits."""
MAX_DECIMALS = 30
"""Digits after the point up to which a decimal is shown in full."""

_EXAMPLE = "3 * (4 + 5)"

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,]) | [0-9]+(?:\.[0-9]*)? | \.[0-9]+)
    | (?P<percent>%(?!\s*\.?[0-9(]))
    | (?P<operator>\*\*|//|[-+*/%()])
    | (?P<word>[^\W\d_]+)
    | (?P<other>\S)
    )""",
    re.VERBOSE,
)
"""`%` is a remainder if an operand follows (`17 % 5`), and a percent sign otherwise (`15% * 80`)."""

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "$": " ", "€": " ", "£": " "})
"""Signs that mean an operator, or that may stand before an amount. One character each, so that positions hold."""

_FIXES = {
    "=": f"Write only what is to be worked out, such as {_EXAMPLE}, without an equals sign.",
    "^": "Write a power with **, such as 2 ** 3.",
    ",": "Write a large number as 1,000 or 1000, and a decimal with a point, such as 2.5.",
    "x": "Multiply with *, such as 3 * 4.",
} | dict.fromkeys("[]{}", "Group with round parentheses ( ).")
"""What to write instead of a sign that cannot be read."""
_TOO_LARGE = "The result has about 1,000 digits or more. Work with smaller numbers."

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class _Token(NamedTuple):
    kind: str
    """`number`, `operator` or `percent`."""
    text: str
    column: int
    """From 1."""


def calculate(expression: str) -> str:
    """Work out an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 3 * (4 + 5) or 15% * 80.

    Returns:
        The value as a whole number or decimal. One that no short decimal can hold is rounded to ten
        digits and followed by the exact fraction: `3.333333333 (exactly 10/3)`.

    Raises:
        ValueError: The expression cannot be read or worked out; the message says what to write.
    """
    return show(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of `expression`. Raises ValueError as `calculate` does."""
    tokens = _tokens(expression)
    _check_grammar(tokens)
    source, values = _to_python(tokens)
    return _walk(ast.parse(source, mode="eval").body, values)


def show(value: Fraction) -> str:
    """`value` as `calculate` writes it."""
    if value.denominator == 1:
        return str(value.numerator)
    decimals = next((count for count in range(1, MAX_DECIMALS + 1) if 10**count % value.denominator == 0), None)
    if decimals is not None:
        scaled = abs(value.numerator) * 10**decimals // value.denominator
        digits = str(scaled).rjust(decimals + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"
    # A private context, so that the result does not depend on the context of this thread.
    context = Context(prec=10, Emax=999_999, Emin=-999_999)
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    exact = str(value)
    return f"{rounded} (exactly {exact})" if len(exact) <= 40 else f"about {rounded}"


def _tokens(expression: str) -> list[_Token]:
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"The expression has {len(expression)} characters, and at most {MAX_LENGTH} are read. Work it out "
            "in several calls."
        )
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(expression.translate(_SPELLINGS)):
        kind = str(match.lastgroup)
        written, column = match[kind], match.start(kind) + 1
        if kind in ("word", "other"):
            only = f"Write numbers and + - * / // % ** ( ) only, such as {_EXAMPLE}"
            fix = _FIXES.get(
                written.lower(), f"{only}: no words, names or functions." if kind == "word" else f"{only}."
            )
            raise ValueError(f"{written!r} at character {column} cannot be read. {fix}")
        tokens.append(_Token(kind, written, column))
    if not tokens:
        raise ValueError(f"The expression is empty. Write one such as {_EXAMPLE}.")
    return tokens


def _check_grammar(tokens: list[_Token]) -> None:
    """Refuse expressions that `ast` cannot parse, or only at a high cost, with a message that says how to fix them."""
    wants_operand, opened, signs = True, 0, 0
    last: _Token | None = None
    for token in tokens:
        sign = wants_operand and token.text in ("+", "-")
        signs = signs + 1 if sign else 0
        if signs > MAX_NESTING:
            raise ValueError(
                f"There are more than {MAX_NESTING} signs in a row at character {token.column}. Write one."
            )
        if token.text == "(":
            if not wants_operand:
                raise ValueError(
                    f"An operator is missing before '(' at character {token.column}. Write 2 * (3 + 4), not 2(3 + 4)."
                )
            opened += 1
            if opened > MAX_NESTING:
                raise ValueError(
                    f"More than {MAX_NESTING} parentheses are open at character {token.column}. Use several calls."
                )
        elif token.text == ")":
            if wants_operand and last is not None:
                raise ValueError(
                    f"A number is missing before ')' at character {token.column}. Write one such as (4 + 5)."
                )
            if opened == 0:
                raise ValueError(f"')' at character {token.column} closes nothing. Take it out, or open it with '('.")
            opened -= 1
        elif token.kind == "number":
            if not wants_operand:
                raise ValueError(
                    f"An operator is missing before {token.text!r} at character {token.column}. Write one such "
                    "as 3 + 4."
                )
            wants_operand = False
        elif token.kind == "percent":
            if last is None or last.kind != "number":
                raise ValueError(
                    f"'%' at character {token.column} has no number before it. Write 15% or (3 + 4) / 100."
                )
        elif not sign:
            if wants_operand:
                raise ValueError(
                    f"A number is missing before {token.text!r} at character {token.column}. Write one such as 3 * 4."
                )
            wants_operand = True
        last = token
    if wants_operand:
        raise ValueError(f"The expression ends too early: a number is missing after {tokens[-1].text!r}.")
    if opened:
        raise ValueError(
            f"{opened} parenthesis is not closed. Add ')'."
            if opened == 1
            else f"{opened} parentheses are not closed. Add ')'."
        )


def _to_python(tokens: list[_Token]) -> tuple[str, dict[str, Fraction]]:
    """The expression with a name for each number, and the values of the names, because `ast` would round decimals."""
    source: list[str] = []
    values: dict[str, Fraction] = {}
    for token in tokens:
        if token.kind == "number":
            name = f"n{len(values)}"
            values[name] = Fraction(token.text.replace(",", ""))
            source.append(name)
        elif token.kind == "percent":
            values[source[-1]] /= 100
        else:
            source.append(token.text)
    return " ".join(source), values


def _walk(node: ast.expr, values: Mapping[str, Fraction]) -> Fraction:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        value = _walk(node.operand, values)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _walk(node.left, values), _walk(node.right, values)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
            raise ValueError("The expression divides by zero. Check the part after the division sign.")
        return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    raise AssertionError(ast.dump(node))  # unreachable: the grammar lets nothing else through


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"The exponent {show(exponent)} is not a whole number. Write one such as 3 ** 2.")
    if base == 0 and exponent < 0:
        raise ValueError("The expression divides by zero: 0 to a negative power.")
    if base in (0, 1, -1):  # of any size the exponent is harmless here, and Fraction would still loop over its bits
        return Fraction(1) if exponent % 2 == 0 and (base or exponent == 0) else base
    if abs(exponent) * _bits(base) > 2 * MAX_BITS:  # a lower bound of the result's size is about half of this
        raise ValueError(_TOO_LARGE)
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError(_TOO_LARGE)
    return value
