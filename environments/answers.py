"""Reading the final number out of a reply, for graders.

Invariant: only what the reply itself declares counts. An `<answer>` tag that holds several numbers, or a
number that is spelt in no known way, is not an answer: a policy cannot win by listing candidates.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Literal, NamedTuple

Style = Literal["hashes", "tags", "sentence", "last_number"]

STYLES: tuple[Style, ...] = ("hashes", "tags", "sentence")
"""The explicit ways of giving an answer; `last_number` is none."""

MAX_DIGITS = 400
"""Characters of the longest number that is read."""

_NUMBER = r"[-+−]?\s?[$€£]?\s?(?:\d{1,3}(?:,\d{3})++(?:\.\d+)?(?!,?\d)|\d+(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+(?:\.\d+)?)?"
_ONE = re.compile(_NUMBER, re.ASCII)
_STYLE_PATTERNS: dict[Style, re.Pattern[str]] = {
    "hashes": re.compile(r"####[ \t]*(?P<answer>[^\n]*)"),
    "tags": re.compile(r"<answer>(?P<answer>(?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE),
    "sentence": re.compile(r"\banswer\s*(?:is|:|=)(?P<answer>[^\n]*?)(?=\.(?!\d)|\n|$)", re.IGNORECASE),
}


class Answer(NamedTuple):
    """A final number, and how the reply gave it."""

    value: Fraction
    style: Style
    text: str
    """The number as it was written."""


def final_number(reply: str, styles: Collection[Style] = STYLES) -> Answer | None:
    """The answer that `reply` gives last in one of `styles`.

    `hashes` is `#### 42`, `tags` is `<answer>42</answer>`, `sentence` is `The answer is 42.`; each must hold one
    number as `one_number` reads it. Where none does and `last_number` is among the styles, the last number of the
    reply counts.
    """
    best: tuple[int, Answer] | None = None
    for style, pattern in _STYLE_PATTERNS.items():
        if style not in styles:
            continue
        for match in pattern.finditer(reply):
            found = _single(match.group("answer"))
            if found is not None and (best is None or match.start() > best[0]):
                best = (match.start(), Answer(found[0], style, found[1]))
    if best is not None:
        return best[1]
    if "last_number" in styles and (numerals := _ONE.findall(_without_joined_signs(reply))):
        value = _read(numerals[-1])
        if value is not None:
            return Answer(value, "last_number", numerals[-1].strip())
    return None


def one_number(text: str) -> Fraction | None:
    """The number in `text` if there is exactly one; of `3 + 4 = 7`, what follows the last `=`.

    Thousands commas, a currency sign, a fraction (`3/4`), a percent sign and units around it are allowed:
    `$1,200`, `12 apples` and `50%` read as 1200, 12 and 50.
    """
    found = _single(text)
    return found[0] if found else None


def _single(text: str) -> tuple[Fraction, str] | None:
    numerals = _ONE.findall(_without_joined_signs(text.rsplit("=", 1)[-1]))
    value = _read(numerals[0]) if len(numerals) == 1 else None
    return None if value is None else (value, numerals[0].strip())


def _read(numeral: str) -> Fraction | None:
    if (
        len(numeral) > MAX_DIGITS
    ):  # Python refuses to read one of more than 4,300 digits, and no task has such an answer
        return None
    plain = re.sub(r"[\s$€£,+]", "", numeral).replace("−", "-")
    top, _, bottom = plain.partition("/")
    if not bottom:
        return Fraction(top)
    return Fraction(top) / Fraction(bottom) if Fraction(bottom) else None


def _without_joined_signs(text: str) -> str:
    """`text` with a `-` that joins (`10-20`, `step-3`) made a space, so that it is not read as a minus sign."""
    return re.sub(r"(?<=[\w)])[-−](?=[\w$(])", " ", text)
