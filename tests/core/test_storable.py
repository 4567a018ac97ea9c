"""What can be stored, and what is refused: each limit at its edge."""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic_core import from_json, to_json

from engine.storable import ELEMENT, MAX_DEPTH, MAX_SIZE, message_of, refusal, valid_text, words_of


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def shared(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value, value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, 2**63 - 1, -(2**63), 1e308, -0.0, "", "é\U0001f600\x00", {"": {"": []}}, nested(MAX_DEPTH),
        (1, (2,)), np.float64(0.5), np.float32(0.5), np.int8(3), np.bool_(True), np.arange(3), np.zeros((2, 2)),
        Color.RED, Level.HIGH, "x" * MAX_SIZE, shared(13),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_taken_is_read_back_by_every_reader(value: Any) -> None:
    assert refusal(value) is None
    text = to_json(value, fallback=lambda item: item.tolist()).decode()
    assert from_json(text) == json.loads(text) == orjson.loads(text)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**63, "it is an integer of more than 64 bits"),
        (-(2**63) - 1, "it is an integer of more than 64 bits"),
        (10**5000, "it is an integer of more than 64 bits"),
        ({"a": [float("nan")]}, "`a[0]` is nan"),
        ([float("-inf")], "`[0]` is -inf"),
        (np.float32("inf"), "it is inf"),
        ({"a": {"b": "\ud800"}}, "`a.b` has half of a character"),
        ({"a": {"\ud800": 1}}, "`a` has a key with half of a character"),
        ({"a": {1: 1}}, "`a` has a key of type int"),
        (nested(MAX_DEPTH + 1), f"is nested more than {MAX_DEPTH} deep"),
        (endless(), f"is nested more than {MAX_DEPTH} deep"),
        ("x" * (MAX_SIZE + 1), f"it has more than {MAX_SIZE:,} characters"),
        ({"a": shared(60)}, f"has more than {MAX_SIZE:,} characters"),
        ([0] * (MAX_SIZE // ELEMENT), f"has more than {MAX_SIZE:,} characters"),
        (np.zeros(MAX_SIZE // ELEMENT + 1), f"it has {MAX_SIZE // ELEMENT + 1:,} elements"),
        ({1}, "it is of type set"),
        (b"x", "it is of type bytes"),
        (np.longdouble(1), "it is of type numpy.longdouble"),
        (np.datetime64("2026-01-01"), "it is of type datetime.date"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20].encode().hex(),
)  # fmt: skip
def test_what_is_refused_is_named_with_its_place_and_its_limit(value: Any, why: str) -> None:
    problem = refusal(value)
    assert problem is not None
    assert why in problem
    problem.encode()


def test_text_of_errors_is_kept_whatever_it_quotes() -> None:
    assert valid_text("a\ud800é") == "a\\ud800é"
    assert valid_text("x" * 50, 10) == "xxxxx\n… 40 characters left out …\nxxxxx"


class MuteError(Exception):
    def __str__(self) -> str:
        raise RecursionError


def test_an_exception_that_cannot_say_what_it_is_is_told_all_the_same() -> None:
    assert message_of(MuteError()) == "(its message cannot be read: RecursionError)"
    assert words_of(ValueError("\ud800")) == "ValueError: \\ud800"
