"""Guards answer true or false or say what to write instead; most mistakes are found without running them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import GuardError
from engine.limits import limit_values
from engine.machine.guards import Guard, guard_problems
from engine.machine.variables import VARIABLES
from engine.schemas.limits import LimitsSpec


def context(**changes: Any) -> dict[str, Any]:
    """A whole guard context."""
    return {
        "turns": {"assistant": 2, "user": 1},
        "tools": {"calls": 3, "errors": 1},
        "tokens": {"sampled": 50, "context": 200},
        "images": {"shown": 0},
        "condensed": {"times": 0},
        "limits": limit_values(LimitsSpec()),
        "rewards": {"total": 1.5, "last": 1.0, "previous": 0.5},
        "last": {"finish": "stop", "tokens": 20, "calls": 1, "malformed": False, "text": "It is 42."},
        "feedback": {"solved": True, "satisfied": False, "malformed": False, "score": 0.5, "kind": "hint"},
        "facts": {"board": [1, 2], "done": False, "deep": {"er": "x"}},
        "task": {"level": "hard", "answer": 42},
    } | changes


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("turns.user < limits.user_turns", True),
        ("feedback.solved && turns.assistant > 1", True),
        ("last.finish == 'length'", False),
        ("last.text.contains('42') ? feedback.score >= 0.5 : false", True),
        ("has(facts.gone) && facts.gone > 1", False),
        ("facts.board.exists(x, x == task.answer)", False),
        ("task['level'] in ['hard', 'harder']", True),
        ("rewards.total - rewards.last == rewards.previous", True),
        ("tokens.context < limits.episode_tokens", True),
        ("limits.episode_seconds > 599", True),
    ],
)
def test_a_guard_tells(expression: str, answer: bool) -> None:
    assert guard_problems(expression) == []
    assert Guard(expression).evaluate(context()) is answer


def test_a_guard_knows_the_variables_that_it_reads() -> None:
    guard = Guard("[1].exists(x, x > turns.user) && has(feedback.a) || facts['task'] == 'limits'")
    assert guard.names == {"turns", "feedback", "facts"}
    assert guard.evaluate({"turns": {"user": 0}, "feedback": {"a": 1}, "facts": {}}) is True


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (
            "feedback.right && turns.user > 0",
            "`feedback.right` does not exist; write `has(feedback.right) && feedback.right`",
        ),
        ("facts.n > 1", "`facts.n` does not exist; write `has(facts.n) && facts.n > 1`"),
        ("!facts.deep.est", "`facts.deep.est` does not exist; write `has(facts.deep.est) && facts.deep.est`"),
        ("facts['n'] == 1", "`facts['n']` does not exist; write `'n' in facts && facts['n'] == 1`"),
        (
            "turns.user * feedback.score > 1.0",
            "`*` cannot be applied to `turns.user` (int) and `feedback.score` (double); "
            "convert one of them: `int(x)`, `double(x)`",
        ),
        (
            "feedback.kind && true",
            "`&&` cannot be applied to `feedback.kind` (string); convert with `string(x)` or test `type(x)` first",
        ),
        ("facts.board[7] == 1", "`facts.board` has 2 elements, and no element 7; test `size(facts.board)` first"),
        ("1 / (turns.user - 1) > 1", "division by zero; test the divisor first (`x != 0 && …`)"),
    ],
)
def test_a_guard_that_cannot_tell_says_what_to_write(expression: str, said: str) -> None:
    with pytest.raises(GuardError) as caught:
        Guard(expression).evaluate(context())
    assert str(caught.value) == f"guard `{expression}`: {said}"
    assert caught.value.blame == "spec"


@pytest.mark.parametrize(
    ("expression", "answer"), [("turns.user", "1"), ("last.text", "'It is 42.'"), ("feedback.score", "0.5")]
)
def test_an_answer_that_is_no_boolean_is_an_error(expression: str, answer: str) -> None:
    with pytest.raises(GuardError) as caught:
        Guard(expression).evaluate(context())
    assert str(caught.value) == f"guard `{expression}` returns {answer} instead of true or false; compare it"


def test_a_variable_that_was_not_handed_over_is_an_error() -> None:
    with pytest.raises(GuardError, match=r"^guard `turns\.user > 1`: there is no variable `turns`$"):
        Guard("turns.user > 1").evaluate({})


def test_a_guard_is_no_longer_than_it_may_be() -> None:
    with pytest.raises(GuardError, match="a guard has 4003 characters; at most 4000 are allowed"):
        Guard("1" * 4000 + "> 0")
    assert [p.message for p in guard_problems("1" * 4000 + "> 0")] == ["4003 characters; at most 4000 are allowed"]


@pytest.mark.parametrize(
    ("expression", "kind", "column", "message", "fix"),
    [
        ("turns.usr < 3", "unknown-name", 7, "`turns` has no field `usr`", "did you mean `user`?"),
        ("has(turns.usr)", "unknown-name", 11, "`turns` has no field `usr`", "did you mean `user`?"),
        ("turns['usr'] > 1", "unknown-name", 7, "`turns` has no field `usr`", "did you mean `user`?"),
        ("1 < 2 &&\n (turn.user > 1)", "unknown-name", 12, "there is no variable `turn`", "did you mean `turns`?"),
        (
            "facts.all(f, f.x > turns.usr)",
            "unknown-name",
            26,
            "`turns` has no field `usr`",
            "did you mean `user`?",
        ),
        (
            "rewards.best > 1.0",
            "unknown-name",
            9,
            "`rewards` has no field `best`",
            "known names: `total`, `last`, `previous`",
        ),
        ("siz(last.text) > 3", "unknown-name", 1, "there is no function `siz`", "did you mean `size`?"),
        ("len(last.text) > 3", "unknown-name", 1, "there is no function `len`", "CEL writes it `size`"),
        ("feedback.solved == True", "unknown-name", 20, "there is no variable `True`", "CEL writes it `true`"),
        (
            "rewards.total + 1 > 2.0",
            "wrong-type",
            15,
            "`+` cannot be applied to `rewards.total` (double) and `1` (int)",
            "convert one of them: `int(x)`, `double(x)`",
        ),
        ("last.text > 3", "wrong-type", 11, "`>` cannot be applied to `last.text` (string) and `3` (int)", None),
        (
            "turns.user == '3'",
            "wrong-type",
            12,
            "`==` is always false here: `turns.user` is an int, `'3'` is a string",
            None,
        ),
        ("last.finish && true", "wrong-type", 1, "`&&` needs true or false; `last.finish` is a string", None),
        ("!turns.user", "wrong-type", 2, "`!` needs true or false; `turns.user` is an int", None),
        ("last.text.foo == 1", "wrong-type", 11, "`last.text` is a string; it has no field `foo`", None),
        (
            "'a' in last.text",
            "wrong-type",
            8,
            "`in` needs a list or a map; `last.text` is a string",
            "`text.contains(part)` searches a string",
        ),
        (
            "rewards.last in task.ids || rewards.last in {'a': 1}",
            "wrong-type",
            42,
            "`rewards.last` is a double; keys of maps are strings",
            None,
        ),
        ("size(last.text, 1) > 2", "wrong-type", 1, "`size` takes 1 argument, not 2", None),
        (
            "contains(last.text, 'a')",
            "wrong-type",
            1,
            "`contains` cannot be called in this way",
            "write `x.contains(…)`",
        ),
        (
            "last.text.exists(x, x)",
            "wrong-type",
            1,
            "`exists` needs a list or a map; `last.text` is a string",
            None,
        ),
        ("turns.user", "not-boolean", 1, "a guard must be true or false; this is an int", "compare it"),
        ("facts.x ? 1 : 2", "not-boolean", 1, "a guard must be true or false; this is an int", "compare it"),
        (
            "feedback.solved ? true : turns.user",
            "wrong-type",
            19,
            "both results of `? :` must have the same type: `true` is a bool, `turns.user` is an int",
            None,
        ),
        ("turns", "not-boolean", 1, "a guard must be true or false; this is a map", None),
        ("turns.user <", "parse", 13, "the expression ends too early", None),
        ("", "parse", 1, "the expression is empty", "leave it out if it always holds"),
        ("1 < 2 and true", "parse", 7, "`and` is not expected here", "CEL writes `&&`"),
        ("not feedback.solved", "parse", 5, "`feedback` is not expected here", "CEL writes `!`"),
        ("turns.user > 1 and feedback.n = 3", "parse", 16, "`and` is no operator", "CEL writes `&&`"),
        ("facts.and = 3", "parse", 11, "`=` cannot be read", "CEL writes `==`"),
        ("turns.user\n= 3", "parse", 12, "`=` cannot be read", "CEL writes `==`"),
        ("x{a: 1}", "parse", 2, "`{` is not expected here", None),
    ],
)
def test_mistakes_are_found_without_running(
    expression: str, kind: str, column: int, message: str, fix: str | None
) -> None:
    assert [(p.kind, p.column, p.message, p.fix) for p in guard_problems(expression)] == [(kind, column, message, fix)]


def test_several_mistakes_are_told_in_the_order_of_their_columns() -> None:
    problems = guard_problems("turns.usr < 3 && (nope || !last.tokens) && foo(1)")
    assert [(p.column, p.message) for p in problems] == [
        (7, "`turns` has no field `usr`"),
        (19, "there is no variable `nope`"),
        (28, "`!` needs true or false; `last.tokens` is an int"),
        (44, "there is no function `foo`"),
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "facts.anything.at.all",
        "task.rows[0].x > 1 || task.name == 'a'",
        "feedback.score > 0.5",
        "feedback.right",
        "facts.items.exists(i, i.price * 2 > 10)",
        "facts.items.map(i, i.n).size() > 1",
        "limits.episode_seconds * 2.0 > 1.0 || limits.episode_seconds * 2 > 1",
        "type(facts.x) == int && facts.x == null",
        "last.finish != 'abort' && last.text.matches('^[0-9]+$')",
    ],
)
def test_what_is_known_only_at_run_time_is_never_a_mistake(expression: str) -> None:
    assert guard_problems(expression) == []


def test_every_documented_field_has_the_type_that_it_says() -> None:
    whole = context()
    names = {int: "int", float: "double", str: "string", bool: "bool"}
    for name, variable in VARIABLES.items():
        for field, member in variable.fields.items():
            assert names[type(whole[name][field])] in member.types, (name, field)


BY_TYPE = {
    "bool": ["feedback.solved", "last.malformed", "true"],
    "int": ["turns.user", "tokens.sampled", "limits.tool_calls", "7", "-1"],
    "double": ["rewards.last", "0.5", "double(turns.user)"],
    "string": ["last.finish", "'stop'", "string(turns.user)"],
}


def typed(kind: str) -> st.SearchStrategy[str]:
    """Expressions of one type whose parts all fit."""
    leaf = st.sampled_from(BY_TYPE[kind])
    if kind == "bool":

        def deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
            compared = st.sampled_from(["int", "double", "string"]).flatmap(
                lambda name: st.builds(
                    "({} {} {})".format,
                    typed(name),
                    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
                    typed(name if name == "string" else "double"),
                )
            )
            return st.one_of(
                compared,
                st.builds("({} {} {})".format, inner, st.sampled_from(["&&", "||", "==", "!="]), inner),
                st.builds("!({})".format, inner),
                st.builds("({} ? {} : {})".format, inner, inner, inner),
                st.builds("[{}, {}].exists(x, x)".format, inner, inner),
                st.builds("({} in [{}])".format, typed("int"), typed("int")),
                st.builds("({}).startsWith({})".format, typed("string"), typed("string")),
            )

        return st.recursive(leaf, deeper, max_leaves=6)
    operators = {"int": ["+", "-", "*"], "double": ["+", "-", "*"], "string": ["+"]}[kind]
    return st.recursive(
        leaf, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(operators), inner), max_leaves=3
    )


contexts = st.builds(
    lambda solved, user, last, finish: context(
        feedback={"solved": solved, "satisfied": False, "malformed": False},
        turns={"assistant": 1, "user": user},
        rewards={"total": last, "last": last, "previous": 0.0},
        last={"finish": finish, "tokens": 1, "calls": 0, "malformed": not solved, "text": finish},
    ),
    st.booleans(),
    st.integers(0, 9),
    st.floats(-2, 2),
    st.sampled_from(["stop", "length", "abort", ""]),
)


@given(typed("bool"), contexts)
@settings(max_examples=examples(150))
def test_what_fits_is_never_called_wrong_and_runs(expression: str, values: dict[str, Any]) -> None:
    assert guard_problems(expression) == []
    assert Guard(expression).evaluate(values) in (True, False)


anything = st.recursive(
    st.sampled_from([leaf for leaves in BY_TYPE.values() for leaf in leaves] + ["null", "[1]", "{'a': 1}"]),
    lambda inner: st.one_of(
        st.builds(
            "({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "%", "<", "==", "in", "&&", "||"]), inner
        ),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
        st.builds("{}({})".format, st.sampled_from(["!", "-", "size", "int", "string", "type"]), inner),
        st.builds("({}).{}".format, inner, st.sampled_from(["size()", "a", "contains('a')", "exists(x, x == 1)"])),
        st.builds("({})[{}]".format, inner, inner),
    ),
    max_leaves=6,
)


@given(anything, contexts)
@settings(max_examples=examples(300))
def test_what_is_not_called_wrong_has_no_error_of_types(expression: str, values: dict[str, Any]) -> None:
    if guard_problems(expression) or "[" in expression or ".a" in expression:
        return  # what stands in a list or a map has a type only when it runs
    message = ""
    try:
        assert Guard(expression).evaluate(values) in (True, False)
    except GuardError as error:
        message = str(error).removeprefix(f"guard `{expression}`: ")
    # Errors of values, not of types: a division by zero, an overflow, a string that is not a number.
    assert not message or re.search(
        r"^division by zero|64 bits$|not a number|invalid literal|could not convert", message
    )


@given(st.text(max_size=40) | st.text(alphabet="turns.user<>=()[]{}!&|'\"+-*/%?: 1aftx\\\n", max_size=30))
def test_no_text_makes_the_checks_fail(expression: str) -> None:
    for problem in guard_problems(expression):
        assert 1 <= problem.column <= len(expression) + 1
