"""Reads the final number of a reply, for graders.

Invariant: only an explicit answer counts. An `<answer>` tag with several numbers, or with a number in an unknown
notation, is not an answer, so a policy earns nothing by listing candidates.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Literal, NamedTuple

Style = Literal["hashes", "tags", "sentence", "last_number"]

STYLES: tuple[Style, ...] = ("hashes", "tags", "sentence")
"""The explicit answer formats; `last_number` is not one of them."""

MAX_DIGITS = 400
"""Maximum number of characters of a number."""

_NUMBER = r"[-+−]?\s?[$€£]?\s?(?:\d{1,3}(?:,\d{3})++(?:\.\d+)?(?!,?\d)|\d+(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+(?:\.\d+)?)?"
_ONE = re.compile(_NUMBER, re.ASCII)
_STYLE_PATTERNS: dict[Style, re.Pattern[str]] = {
    "hashes": re.compile(r"####[ \t]*(?P<answer>[^\n]*)"),
    "tags": re.compile(r"<answer>(?P<answer>(?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE),
    "sentence": re.compile(r"\banswer\s*(?:is|:|=)(?P<answer>[^\n]*?)(?=\.(?!\d)|\n|$)", re.IGNORECASE),
}


class Answer(NamedTuple):
    """A final number and the format in which the reply gave it."""

    value: Fraction
    style: Style
    text: str
    """The number as it was written."""


def final_number(reply: str, styles: Collection[Style] = STYLES) -> Answer | None:
    """The last answer of `reply` in one of `styles`; None if there is none.

    `hashes` is `#### 42`, `tags` is `<answer>42</answer>`, `sentence` is `The answer is 42.`; each must contain exactly
    one number, as `one_number` reads it. If there is none and `last_number` is one of the styles, the last number of
    the reply counts.
    """
    best: tuple[int, Answer] | None = None
    for style, pattern in _STYLE_PATTERNS.items():
        if style not in styles:
            continue
        for match in pattern.finditer(reply):
            number = _single(match.group("answer"))
            if number is not None and (best is None or match.start() > best[0]):
                best = (match.start(), Answer(number[0], style, number[1]))
    if best is not None:
        return best[1]
    if "last_number" in styles and (numerals := _ONE.findall(_without_joined_signs(reply))):
        value = _read(numerals[-1])
        if value is not None:
            return Answer(value, "last_number", numerals[-1].strip())
    return None


def one_number(text: str) -> Fraction | None:
    """The number in `text` if there is exactly one; in `3 + 4 = 7`, only the part after the last `=` is read.

    Thousands commas, a currency sign, a fraction (`3/4`), a percent sign and units around it are allowed:
    `$1,200`, `12 apples` and `50%` read as 1200, 12 and 50.
    """
    number = _single(text)
    return number[0] if number else None


def _single(text: str) -> tuple[Fraction, str] | None:
    numerals = _ONE.findall(_without_joined_signs(text.rsplit("=", 1)[-1]))
    value = _read(numerals[0]) if len(numerals) == 1 else None
    return None if value is None else (value, numerals[0].strip())


def _read(numeral: str) -> Fraction | None:
    if len(numeral) > MAX_DIGITS:  # Python refuses numbers of more than 4,300 digits, and no task has such an answer
        return None
    plain = re.sub(r"[\s$€£,+]", "", numeral).replace("−", "-")
    top, _, bottom = plain.partition("/")
    if not bottom:
        return Fraction(top)
    return Fraction(top) / Fraction(bottom) if Fraction(bottom) else None


def _without_joined_signs(text: str) -> str:
    """`text` with each hyphen (`10-20`, `step-3`) replaced by a space, so that it is not read as a minus sign."""
    return re.sub(r"(?<=[\w)])[-−](?=[\w$(])", " ", text)
