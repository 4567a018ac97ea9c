"""Reading a final number: only what a reply declares, and never one of several candidates."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.environments.answers import Answer, final_number, one_number


@pytest.mark.parametrize(
    ("reply", "value", "style", "text"),
    [
        ("Natalia sold 48+24 = 72 clips.\n#### 72", 72, "hashes", "72"),
        ("#### $1,234.50", Fraction("1234.5"), "hashes", "$1,234.50"),
        ("####72\n", 72, "hashes", "72"),
        ("<answer>42</answer>", 42, "tags", "42"),
        ("<ANSWER> 42 apples </ANSWER>", 42, "tags", "42"),
        ("<answer>3 * 4 = 12</answer>", 12, "tags", "12"),
        ("<answer>\n-7\n</answer>.", -7, "tags", "-7"),
        ("<answer>1<answer>2</answer>", 2, "tags", "2"),
        ("The answer is 33.", 33, "sentence", "33"),
        ("so the answer is: 12", 12, "sentence", "12"),
        ("Answer: -3", -3, "sentence", "-3"),
        ("The final answer is **1,000** eggs.", 1000, "sentence", "1,000"),
        ("The answer is 3/4.", Fraction(3, 4), "sentence", "3/4"),
        ("The answer is about 2.5", Fraction(5, 2), "sentence", "2.5"),
        ("The answer is 5 + 7 = 12.", 12, "sentence", "12"),
        ("The answer is therefore 12 apples, as needed", 12, "sentence", "12"),
        ("The answer is 5. No, wait.\n#### 6", 6, "hashes", "6"),
        ("#### 6\nNo: the answer is 5.", 5, "sentence", "5"),
        ("<answer>1</answer> <answer>2</answer>", 2, "tags", "2"),
    ],
)
def test_the_last_declared_answer_counts(reply: str, value: Fraction | int, style: str, text: str) -> None:
    assert final_number(reply) == Answer(Fraction(value), style, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "42",
        "It is 42 apples.",
        "The answer is N.",
        "The answer is 5 + 7.",
        "The answer is 5, or 7.",
        "The answer is forty-two.",
        "<answer></answer>",
        "<answer>42",
        "42</answer>",
        "<answer>1 2 3</answer>",
        "<answer>40 or 42</answer>",
        "#### ",
        "#### 1 or 2",
        "<answer>1/0</answer>",
    ],
)
def test_what_declares_no_single_number_is_no_answer(reply: str) -> None:
    assert final_number(reply) is None


def test_the_last_number_counts_only_where_it_is_asked_for() -> None:
    assert final_number("2 + 3 makes 5.", ["last_number"]) == Answer(Fraction(5), "last_number", "5")
    assert final_number("#### 7, of 9", ["hashes", "last_number"]) == Answer(Fraction(9), "last_number", "9")
    assert final_number("#### 7\nChecked 9 times.", ["hashes", "last_number"]) == Answer(Fraction(7), "hashes", "7")
    assert final_number("none", ["last_number"]) is None


def test_only_the_styles_that_are_asked_for_are_read() -> None:
    reply = "#### 1\n<answer>2</answer>\nThe answer is 3."
    assert final_number(reply, ["hashes"]) == Answer(Fraction(1), "hashes", "1")
    assert final_number(reply, ["tags"]) == Answer(Fraction(2), "tags", "2")
    assert final_number(reply, ["sentence"]) == Answer(Fraction(3), "sentence", "3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$1,200", 1200),
        ("12 apples", 12),
        ("50%", 50),
        ("−4", -4),
        ("+4", 4),
        ("- $5", -5),
        (".5", Fraction(1, 2)),
        ("1.5/2.5", Fraction(3, 5)),
        ("3 + 4 = 7", 7),
        ("x = 4", 4),
        ("step-3", 3),
        ("10-20", None),
        ("1 2", None),
        ("", None),
        ("none", None),
        ("3/0", None),
        ("٣", None),
    ],
)
def test_one_number_reads_exactly_one(text: str, value: Fraction | int | None) -> None:
    assert one_number(text) == value


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3), st.sampled_from(["{}", "{:,}"]))
def test_every_decimal_reads_back_in_every_style(number: object, layout: str) -> None:
    written = layout.format(number)
    for template in ("#### {}", "<answer>{}</answer>", "The answer is {}."):
        answer = final_number(template.format(written))
        assert answer is not None
        assert answer.value == Fraction(str(number))


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(reply: str) -> None:
    answer = final_number(reply, ["hashes", "tags", "sentence", "last_number"])
    assert answer is None or isinstance(answer.value, Fraction)


@given(st.integers(1, 3000))
def test_long_runs_of_one_sign_cost_no_time(count: int) -> None:
    for sign in ("<answer>", "#", "1,", "1,000,0", ",000", "answer is ", "-", "1/"):
        final_number(sign * count, ["hashes", "tags", "sentence", "last_number"])
