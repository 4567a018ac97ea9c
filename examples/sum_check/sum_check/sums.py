"""Finds sums such as `17 + 25 = 42` in a text, and works them out with the engine's calculator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice

from engine.environments.tools.calculator import evaluate, show
from engine.schemas.base import Struct

MAX_SUMS = 50
"""Maximum number of sums of one text that are checked."""
_CLAUSE_END = re.compile(r"[.,;:]\s+|\n")
_BULLET = re.compile(r"\A\s*[-*]\s+")
_SUM = re.compile(r"[-0-9.,+*/×·÷−–%()$= ]+")
_NUMBER = re.compile(r"[0-9,]*(?:\.([0-9]+))?")


class CheckedSum(Struct, frozen=True, kw_only=True):
    """One sum of a text."""

    text: str
    """As it is written: `17 + 25 = 43`."""
    value: str
    """What its left side is: `42`."""
    right: bool


def checked_sums(text: str) -> list[CheckedSum]:
    """The sums of a text in their order. What cannot be worked out, such as an equation with a variable, is left out."""
    clauses = (_BULLET.sub("", clause) for clause in _CLAUSE_END.split(text))
    return list(islice((checked for clause in clauses for checked in _sums_of(clause)), MAX_SUMS))


def _sums_of(clause: str) -> Iterator[CheckedSum]:
    for match in _SUM.finditer(clause):
        left, *others = (side.strip(" .,") for side in match[0].split("="))
        before, after = clause[: match.start()].strip(), clause[match.end() :]
        if _NUMBER.fullmatch(left):
            continue  # `x = 5`: there is nothing to work out
        if before[-1:].isalnum() and (match[0][0] != " " or left[0] in "+-*/"):
            continue  # `f(2) + 3 = 9`, `x + 5 = 7`
        if others and after[:1].isalnum() and match[0][-1] != " ":
            others.pop()  # `4 + 4 = 2x`
        if not others or (value := _value(left)) is None:
            continue
        for side in others:
            if (claimed := _value(side)) is not None:
                yield CheckedSum(text=f"{left} = {side}", value=show(value), right=_agree(value, claimed, side))


def _value(side: str) -> Fraction | None:
    """What one side is; None if it cannot be worked out."""
    try:
        return evaluate(side)
    except ValueError:
        return None


def _agree(value: Fraction, claimed: Fraction, side: str) -> bool:
    """Whether both are the same, or `side` is a decimal to which the value is rounded."""
    number = _NUMBER.fullmatch(side)
    decimals = len(number[1] or "") if number else 0
    return value == claimed or (decimals > 0 and abs(value - claimed) <= Fraction(1, 2 * 10**decimals))
