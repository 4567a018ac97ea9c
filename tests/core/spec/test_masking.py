"""Values of variables do not appear in messages, however these write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spec.references import PART, mask, masked
from engine.spec.text.diagnostic import Diagnostic, Origin

KEY = "sk-Live_90+4f/x=="


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("it is `hunter2-hunter2`", "hunter2-hunter2", "it is `${X}`"),
        ("no module `hunter2_hunter2`", "hunter2-hunter2", "no module `${X}`"),
        ("looked for /a/b/hunter2x/c", "hunter2x", "looked for /a/b/${X}/c"),
        ("it is `hunter`, not hunters", "hunter", "it is `${X}`, not hunters"),
        ("must be one of 12; it is `12`", "12", "must be one of 12; it is `12`"),
        ("costs 9,041,722 tokens (9041722)", "9041722", "costs ${X} tokens (${X})"),
        ("it is `a\\nlong one`", "a\nlong one", "it is `${X}`"),
        ("the variable `X` is not `${X}`", "X", "the variable `X` is not `${X}`"),
        ("nothing", "", "nothing"),
        ("a b", " ", "a b"),
    ],
)
def test_a_value_is_replaced_by_its_variable(text: str, value: str, expected: str) -> None:
    assert mask(text, {"X": value}) == expected


def test_what_is_about_the_variable_shows_no_short_value_and_no_word_of_it() -> None:
    assert mask("it is `12`; there is no module `abc`", {"X": "12", "Y": "abc.defgh"}, ["X", "Y"]) == (
        "it is `${X}`; there is no module `${Y}`"
    )


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.integers(0, 40), st.integers(0, 90), st.text(max_size=20))
def test_no_long_part_of_a_value_is_left(before: str, start: int, length: int, after: str) -> None:
    value = "".join(f"{KEY}{index}" for index in range(8))
    shown = mask(before + value[start : start + length] + "…" + after, {"X": value})
    assert not any(value[index : index + PART] in shown for index in range(len(value) - PART + 1))


def test_every_part_of_a_finding_is_masked() -> None:
    item = Diagnostic(
        "r", "error", f"no `{KEY}`", f"looked for {KEY}", Origin(f"{KEY}.yaml", 2, 3, f"extends {KEY}"), (KEY, 0)
    )
    assert masked(item, {"X": KEY}) == Diagnostic(
        "r", "error", "no `${X}`", "looked for ${X}", Origin("${X}.yaml", 2, 3, "extends ${X}"), ("${X}", 0)
    )
    assert masked(item, {}) == item
