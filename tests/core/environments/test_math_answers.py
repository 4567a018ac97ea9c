"""Answers are one number, however it is written; nothing else is one, and no answer takes long to check."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.environments.math_answers import final_answer, read_number, same_number


def value(text: str) -> float | None:
    found = read_number(text)
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5.0),
        ("-5", -5.0),
        ("−5", -5.0),
        ("18.81", 18.81),
        (".5", 0.5),
        ("12.", 12.0),
        ("  7 ", 7.0),
        ("1,234", 1234.0),
        ("1{,}234.5", 1234.5),
        ("$5$", 5.0),
        ("\\$5", 5.0),
        ("\\(5\\)", 5.0),
        ("x = 5", 5.0),
        ("m\\angle A = 60^\\circ", 60.0),
        ("14.72 \\approx 14.7", 14.7),
        ("53^\\circ", 53.0),
        ("53^{\\circ}", 53.0),
        ("53°", 53.0),
        ("53 degrees", 53.0),
        ("12 cm", 12.0),
        ("12\\text{ cm}^2", 12.0),
        ("12 square units", 12.0),
        ("2/3", 2 / 3),
        ("\\frac{8}{15}", 8 / 15),
        ("\\dfrac { 3 } { 5 }", 0.6),
        ("\\frac56", 5 / 6),
        ("3\\frac{1}{2}", 3.5),
        ("2\\sqrt{221}", 2 * math.sqrt(221)),
        ("2 \\sqrt { 221 }", 2 * math.sqrt(221)),
        ("8 \\sqrt 2", 8 * math.sqrt(2)),
        ("3*sqrt(5)", 3 * math.sqrt(5)),
        ("3√5", 3 * math.sqrt(5)),
        ("\\frac{12\\sqrt{3}}{2}", 6 * math.sqrt(3)),
        ("5\\pi", 5 * math.pi),
        ("5π", 5 * math.pi),
        ("2^3", 8.0),
        ("2^{\\frac{1}{2}}", math.sqrt(2)),
        ("\\left(3+4\\right)/2", 3.5),
        ("2 \\cdot 3", 6.0),
        ("{{12}}", 12.0),
        ("{" * 50 + "12" + "}" * 50, 12.0),
        ("(" * 50 + "12" + ")" * 50, 12.0),
    ],
)
def test_one_number_is_read_however_it_is_written(text: str, number: float) -> None:
    assert value(text) == pytest.approx(number, abs=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5x",
        "none",
        "5, 6",
        "5 6",
        "5 or 6",
        "5 cm or 6 cm",
        "5;6",
        "{5, 6}",
        "\\{5, 6\\}",
        "\\pm 5",
        "4 < x < 6",
        "[4, 6]",
        "18.8.1",
        "\\infty",
        "5/0",
        "\\sqrt{-1}",
        "\\sin 30",
        "1e5",
        "10000!",
        "9^{9^9}",
        "9^99",
        "(((2^9)^9)^9)^9",
        "2**9**9**9",
        "\\sum_{n=1}^{9} n",
        "\\boxed{5} \\boxed{6}",
        "1" * 121,
        "9999999999999999",
        "2+" + "{1+" * 6 + "1" + "}" * 6,
        "\\sqrt{" * 6 + "2" + "}" * 6,
        "(1}",
        "1)",
        "}1{",
    ],
)
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("so \\boxed{5}", "5"),
        ("\\boxed{1}, no: \\boxed { \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{2}, no: \\boxed{3", "2"),
        ("<answer> 4 </answer>", "4"),
        ("<answer>4</answer> \\boxed{5}", "5"),
        ("\\boxed{5} <ANSWER>4</ANSWER>", "4"),
        ("<answer>It is \\boxed{7}</answer>", "7"),
        ("<answer><answer>8</answer>", "8"),
        ("It is 5.", None),
        ("\\boxed 5", None),
        ("", None),
    ],
)
def test_the_last_closed_answer_counts(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


def same(answer: str, gold: str, tolerance: float) -> bool:
    said, right = read_number(answer), read_number(gold)
    assert said is not None
    assert right is not None
    return same_number(said, right, tolerance)


@pytest.mark.parametrize(
    ("answer", "gold", "tolerance", "right"),
    [
        ("\\frac{8}{15}", "0.53", 0.01, True),
        ("0.54", "0.53", 0.01, False),
        ("99", "100", 0.01, True),
        ("98.99", "100", 0.01, False),
        ("-5", "5", 0.01, False),
        ("29.73", "2\\sqrt{221}", 0.01, True),
        ("\\sqrt{884}", "2\\sqrt{221}", 0.0, True),
        ("29.73", "2\\sqrt{221}", 0.0, False),
        ("0.5", "\\frac{1}{2}", 0.0, True),
        ("100.0001", "100", 0.0, False),
        ("0", "0", 0.01, True),
    ],
)
def test_a_tolerance_is_relative_and_none_is_exact(answer: str, gold: str, tolerance: float, right: bool) -> None:
    assert same(answer, gold, tolerance) is right


@settings(deadline=None, max_examples=examples(300))
@given(text=st.text(alphabet="0123456789.,+-*/^(){}[]\\ =x", max_size=40) | st.text(max_size=60))
@example("\\frac{}{}")
@example("^^^")
@example("\\sqrt{\\sqrt{\\sqrt{\\sqrt{7}}}}")
def test_no_answer_breaks_the_reader(text: str) -> None:
    found = read_number(text)
    assert found is None or math.isfinite(found.value)
    final_answer(text)


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(-(10**6), 10**6), st.integers(1, 999))
def test_fractions_are_exact(top: int, bottom: int) -> None:
    assert value(f"\\frac{{{top}}}{{{bottom}}}") == pytest.approx(top / bottom, rel=1e-12)


def test_threads_may_read_at_once() -> None:
    texts = [f"\\frac{{{index}}}{{7}} + {index}" for index in range(64)]
    read_number.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(value, texts))
    assert found == pytest.approx([index / 7 + index for index in range(64)])


def test_importing_the_environments_imports_no_math() -> None:
    code = (
        "import sys, engine.environments.geo3k, engine.environments.color_square\n"
        "print(sorted({'math_verify', 'sympy', 'PIL', 'pyarrow', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
