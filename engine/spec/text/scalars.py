"""A plain YAML scalar -> the value that the core schema of YAML 1.2 gives it.

Invariant: `yes`, `no`, `on`, `off`, `1:30`, `1_000` and dates are strings; `1e-5` is a float; `010` is ten.
"""

from __future__ import annotations

import re

ScalarValue = str | int | float | bool | None

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_FIRST = frozenset("0123456789-+.")

MAX_DIGITS = 4000
"""Python refuses to read longer integers by default."""
MAX_HEX = 3000
"""As many digits of base 16 are fewer of base 10 than Python refuses to write."""


def read_scalar(text: str) -> ScalarValue:
    """What an unquoted scalar means. An integer of more than `MAX_DIGITS` digits stays a string."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text[0] in _FIRST and len(text) <= MAX_DIGITS:
        return _read_number(text)
    return text


def _read_number(text: str) -> ScalarValue:
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16) if len(text) <= MAX_HEX else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if sign := _INF.fullmatch(text):
        return float(f"{sign[1]}inf")
    return float("nan") if text in _NAN else text
