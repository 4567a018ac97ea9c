"""Plain scalars are read by the core schema of YAML 1.2."""

from __future__ import annotations

import math

import pytest

from engine.spec.text.tree import MAX_DIGITS, read_scalar


@pytest.mark.parametrize(
    "text",
    ["yes", "no", "on", "off", "y", "Yes", "tRUE", "1:30", "1_000", "2026-11-21", "0b1", "1e", ".", "-", "+.inf "],
)
def test_what_yaml_1_1_would_convert_stays_a_string(text: str) -> None:
    assert read_scalar(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", True),
        ("TRUE", True),
        ("false", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("010", 10),
        ("-7", -7),
        ("+3", 3),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
    ],
)
def test_core_schema_values(text: str, value: object) -> None:
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_nan_is_a_float() -> None:
    assert math.isnan(read_scalar(".nan"))  # type: ignore[arg-type]


def test_an_endless_number_stays_a_string() -> None:
    text = "1" * (MAX_DIGITS + 1)
    assert read_scalar(text) == text
