"""What is said of guards without running them agrees with CEL when they run."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import GuardError
from engine.machine.guards import Guard
from engine.validate.logic import Ranges, formula, implies, overlap

LIMITS = (("assistant_turns", 8.0), ("user_turns", 3.0))
RANGES: Ranges = {"turns.assistant": (1, 8), "turns.user": (0, 3)}


@pytest.mark.parametrize(
    ("guard", "truth"),
    [
        ("true", True),
        ("!true", False),
        ("1 < 2", True),
        ("'a' == 'b'", False),
        ("turns.user < limits.user_turns", None),
        ("turns.user <= limits.user_turns", True),
        ("turns.user > 3", False),
        ("turns.assistant >= 1", True),
        ("turns.user > 1 && turns.user < 2", False),
        ("turns.user == 1.5", False),
        ("turns.user + 1 < 2 && turns.user > 0", False),
        ("2 * turns.user > 6", False),
        ("turns.assistant - turns.user > 8", False),
        ("limits.user_turns - turns.user >= 0", True),
        ("last.finish == 'over'", False),
        ("last.finish in ['stop', 'length', 'abort', '']", True),
        ("last.finish in ['stop']", None),
        ("feedback.solved && !feedback.solved", False),
        ("feedback.solved || !feedback.solved", True),
        ("feedback.solved == false && feedback.solved", False),
        ("facts.x == 1 && facts.x == 'a'", False),
        ("facts.x == 1 || facts.x == 'a'", None),
        ("last.text.contains('x') && !last.text.contains('x')", False),
        ("has(facts.a) ? facts.a > 1 : false", None),
        ("rewards.total > 1.0 && rewards.total < 1.0", False),
        ("rewards.total >= 1.0 && rewards.total <= 1.0", None),
        ("this is not CEL", None),
    ],
)
def test_a_guard_is_always_true_never_or_neither(guard: str, truth: bool | None) -> None:
    assert formula(guard, LIMITS).truth(RANGES) is truth


@pytest.mark.parametrize(
    ("first", "second", "both", "follows"),
    [
        ("turns.user < 2", "turns.user >= 2", False, False),
        ("turns.user < 2", "turns.user < 3", True, True),
        ("turns.user < 3", "turns.user < 2", True, False),
        ("feedback.solved", "turns.user > 1", True, False),
        ("feedback.solved && turns.user > 1", "feedback.solved", True, True),
        ("facts.level == 'a'", "facts.level == 'b'", False, False),
        ("turns.user < turns.assistant", "turns.user >= turns.assistant", False, False),
    ],
)
def test_two_guards_overlap_or_follow(first: str, second: str, both: bool, follows: bool) -> None:
    a, b = formula(first, LIMITS), formula(second, LIMITS)
    assert (overlap(a, b, {}), implies(a, b, {})) == (both, follows)


atoms = st.sampled_from(
    [
        "turns.user",
        "turns.assistant",
        "turns.user + 1",
        "turns.assistant - turns.user",
        "limits.user_turns",
        "2 * turns.user",
        "-1",
        "0",
        "1",
        "2",
        "3",
    ]
)
comparisons = st.tuples(atoms, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), atoms).map(" ".join)
truths = st.sampled_from(
    ["feedback.solved", "feedback.solved == false", "last.finish == 'stop'", "last.finish in ['', 'abort']", "true"]
)
guards = st.recursive(
    comparisons | truths,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(lambda parts: f"({' '.join(parts)})")
        | inner.map(lambda part: f"!({part})")
        | st.tuples(inner, inner, inner).map(lambda parts: f"(({parts[0]}) ? ({parts[1]}) : ({parts[2]}))")
    ),
    max_leaves=5,
)
contexts = st.fixed_dictionaries(
    {
        "turns": st.fixed_dictionaries({"assistant": st.integers(1, 8), "user": st.integers(0, 3)}),
        "limits": st.just({"assistant_turns": 8, "user_turns": 3}),
        "feedback": st.fixed_dictionaries({"solved": st.booleans()}),
        "last": st.fixed_dictionaries({"finish": st.sampled_from(["", "stop", "length", "abort"])}),
    }
)


def holds(guard: str, context: dict[str, Any]) -> bool | None:
    try:
        return Guard(guard).evaluate(context)
    except GuardError:
        return None


@settings(max_examples=examples(400), deadline=None)
@given(guards, guards, contexts)
def test_what_is_said_of_guards_is_what_cel_answers(first: str, second: str, context: dict[str, Any]) -> None:
    a, b = formula(first, LIMITS), formula(second, LIMITS)
    answers = holds(first, context), holds(second, context)
    if answers[0] is not None:
        assert a.truth(RANGES) in (None, answers[0])
    if None not in answers:
        if all(answers) and not a.pairs and not b.pairs:
            assert overlap(a, b, RANGES)
        if implies(a, b, RANGES) and answers[0]:
            assert answers[1]


@settings(max_examples=examples(150), deadline=None)
@given(guards)
def test_what_can_vary_is_not_called_constant(guard: str) -> None:
    """Where every comparison is of one quantity, `None` means that both answers can be had."""
    found = formula(guard, LIMITS)
    if found.pairs or found.truth(RANGES) is not None:
        return
    answers = {
        holds(
            guard,
            {
                "turns": {"assistant": turns, "user": user},
                "limits": {"assistant_turns": 8, "user_turns": 3},
                "feedback": {"solved": solved},
                "last": {"finish": finish},
            },
        )
        for turns in range(1, 9)
        for user in range(4)
        for solved in (True, False)
        for finish in ("", "stop", "length", "abort")
    }
    assert {True, False} <= answers
