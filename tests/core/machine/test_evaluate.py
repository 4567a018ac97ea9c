"""Evaluation follows the CEL specification: the expected values are those of an independent implementation (cel-rust)."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
from typing import Any

import pytest

from engine.errors import GuardError
from engine.machine.guards import Guard

FACTS = {"l": [1, 2], "s": "abc", "m": {"a": 1}, "t": (1, 2)}


def value(expression: str) -> Any:
    return Guard(expression).value({"facts": FACTS})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("-7 / 2", -3),
        ("-7 % 2", -1),
        ("7 % -2", 1),
        ("7.0 / 0.0", math.inf),
        ("-7.0 / 0.0", -math.inf),
        ("1 < 2.5 && 1 == 1.0 && [1] == [1.0] && 1 in [1.0]", True),
        ("true == 1 || [1, true] == [1, 1] || 'a' == 1 || 1 in {'a': 1}", False),
        ("true > false && 'a' < 'b'", True),
        ("facts.m == {'a': 1.0} && 'a' in facts.m && null == null", True),
        ("facts.t == facts.l && facts.t + [3] == [1, 2, 3]", True),
        ("string(1.0) + string(1.5e20) + string(0.1) + string(-7) + string('a')", "11500000000000000000000.1-7a"),
        ("int('12') + int(2.9) + int(-2.9)", 12),
        ("double('1e3') + double(1)", 1001.0),
        ("size('é') + 'ab'.size() + size(facts.m) + size(facts.l)", 6),
        ("type(1) == int && type([]) == list && type(null) == null_type && type(type(1)) == type", True),
        ("type(1) == 'int'", False),
        ("[1, 2].map(x, x > 1, x * 2) + [1, 2].filter(x, x > 1)", [4, 2]),
        ("[1, 2].exists_one(x, x > 1) && !([1, 1].exists_one(x, x == 1))", True),
        ("facts.m.exists(k, k == 'a') && facts.m.all(k, k == 'a') && facts.m.map(k, k) == ['a']", True),
        ("[1, 2].all(x, [3, 4].all(y, x < y && x > 0)) && [].all(x, false) && ![].exists(x, true)", True),
        ("[[1, 2], [3]].map(x, x.map(x, x + 1))", [[2, 3], [4]]),
        ("'abc'.matches('^a.c$') && !'abc'.matches('^b')", True),
        ("'abc'.contains('b') && 'abc'.startsWith('a') && 'abc'.endsWith('c')", True),
        ("has(facts.m.a) && !has(facts.m.b)", True),
        ("facts['l'][0] + facts.l[1] + {'a': 1}.a", 4),
        ("true ? 1 : facts.gone", 1),
        # An error in one operand is ignored if another one decides, on either side.
        ("facts.gone > 1 && false", False),
        ("facts.gone > 1 || true", True),
        ("false && facts.gone > 1", False),
        ("--1 - -(-1)", 0),
        ("0.1 + 0.2 == 0.3", False),
    ],
)
def test_values(expression: str, expected: Any) -> None:
    found = value(expression)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 % 0", "division by zero; test the divisor first (`x != 0 && …`)"),
        ("9223372036854775807 + 1", "`+` of `9223372036854775807, 1`: the result does not fit into 64 bits"),
        ("int(1e19)", "`int` of `1e19`: the result does not fit into 64 bits"),
        ("int('1_0')", "`int` of `'1_0'`: '1_0' is not a number"),
        ("-true", "`-` cannot be applied to `true` (bool); convert with `string(x)` or test `type(x)` first"),
        (
            "'a' * 3",
            "`*` cannot be applied to `'a'` (string) and `3` (int); convert with `string(x)` or test `type(x)` first",
        ),
        ("1 && true", "`&&` cannot be applied to `1` (int); convert with `string(x)` or test `type(x)` first"),
        ("1 ? 2 : 3", "`?` cannot be applied to `1` (int); convert with `string(x)` or test `type(x)` first"),
        ("facts.gone > 1 && facts.l[0] == 1", "`facts.gone` does not exist; write `has(facts.gone) && facts.gone > 1`"),
        ("has(facts.s.b)", "`facts.s` is string; it has no fields"),
        ("facts.l.x", "`facts.l` is list; `facts.l.x` does not exist"),
        ("facts.l[-1]", "`facts.l` has 2 elements, and no element -1; test `size(facts.l)` first"),
        ("facts.s[0]", "`facts.s` is string; `facts.s[0]` does not exist"),
        ("{1: 2}", "`1` is int; keys of maps are strings"),
        (
            "1 in 'a'",
            "`in` cannot be applied to `1` (int) and `'a'` (string); convert with `string(x)` or test `type(x)` first",
        ),
        (
            "'a'.all(x, true)",
            "`all` cannot be applied to `'a'` (string); convert with `string(x)` or test `type(x)` first",
        ),
        (
            "[1].filter(x, x)",
            "`filter` cannot be applied to `x` (int); convert with `string(x)` or test `type(x)` first",
        ),
    ],
)
def test_errors_say_what_to_write(expression: str, message: str) -> None:
    with pytest.raises(GuardError) as caught:
        value(expression)
    assert str(caught.value) == f"guard `{expression}`: {message}"


def test_an_invalid_pattern_is_an_error_of_the_guard() -> None:
    with pytest.raises(
        GuardError, match=r"^guard `'abc'\.matches\('\('\)`: `matches` of `'abc', '\('`: Invalid regular expression"
    ):
        value("'abc'.matches('(')")


def test_a_pattern_takes_linear_time() -> None:
    """Python's `re` needs more than 2**60 steps for this."""
    assert Guard("facts.x.matches('^(a+)+$')").evaluate({"facts": {"x": "a" * 60 + "b"}}) is False


@pytest.mark.parametrize("call", ["nope(1)", "facts.nope()", "size(1, 2)", "contains('a', 'b')", "'1'.int()"])
def test_a_function_that_does_not_exist_is_refused_before_evaluation(call: str) -> None:
    with pytest.raises(GuardError, match=r"there is no (function|method) `"):
        Guard(call)


def test_subclasses_of_plain_types_are_values_of_those_types() -> None:
    class Level(enum.StrEnum):
        HARD = "hard"

    class Number(enum.IntEnum):
        TWO = 2

    guard = Guard("facts.level == 'hard' && facts.level.startsWith('h') && facts.n + 1 == 3 && facts.n < 3")
    assert guard.evaluate({"facts": {"level": Level.HARD, "n": Number.TWO}}) is True


def test_a_value_that_is_nested_too_deeply_is_an_error_of_the_guard() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(GuardError, match="nested too deeply"):
        Guard("facts.a == facts.b").evaluate({"facts": {"a": deep, "b": [deep[0]]}})


@pytest.mark.slow
def test_guards_import_nothing_large() -> None:
    code = "import sys, engine.machine.guards; print(sorted({'cel', 'pyarrow', 'torch', 'prompt_toolkit'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
