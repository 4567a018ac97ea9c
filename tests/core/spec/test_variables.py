"""Values from the environment (`${NAME}`) and from `--set`."""

from __future__ import annotations

import os

import pytest
from spec_files import GOOD, errors, load, write

from engine.schemas.backend import ScriptedBackendSpec
from engine.schemas.limits import LimitsSpec
from engine.spec.text.diagnostic import Origin

pytestmark = pytest.mark.usefixtures("in_folder")


def test_variables_are_filled_in_and_read_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNS", "3")
    monkeypatch.setenv("WHERE", "models/x")
    loaded = load(
        GOOD
        + "limits: {user_turns: \"${TURNS}\", tool_seconds: '${SECONDS_EACH:2.5}'}\n"
        + "description: in ${WHERE}/${NAME_HERE:y}, costs $${PRICE}\n"
    )
    assert loaded.spec.limits.user_turns == 3
    assert loaded.spec.limits.tool_seconds == 2.5
    assert loaded.spec.description == "in models/x/y, costs ${PRICE}"
    assert loaded.origin(("limits", "user_turns")) == Origin("s.yaml", 5, 22, "${TURNS}")
    assert loaded.origin(("description",)) == Origin("s.yaml", 6, 14, "${WHERE}, ${NAME_HERE}")


def test_where_text_is_wanted_a_variables_text_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISION", "0123")
    monkeypatch.setenv("STOP", "7")
    loaded = load(
        GOOD + "description: ${REVISION}\nsampling: {stop: ['${STOP}']}\nuser: {use: a:b, with: {n: '${STOP}'}}\n"
    )
    assert loaded.spec.description == "0123"
    assert loaded.data["description"] == "0123"
    assert loaded.spec.sampling.stop == ["7"]
    assert loaded.spec.user is not None
    assert loaded.spec.user.with_ == {"n": 7}


def test_a_block_scalar_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "5")
    assert load(GOOD + "user: {use: a:b}\ndescription: |-\n  ${N}\n").spec.description == "5"


def test_an_unset_variable_is_an_error_with_its_place() -> None:
    os.environ.pop("NOT_SET_HERE", None)
    assert errors(write("s.yaml", GOOD + "description: a ${NOT_SET_HERE} b\n")) == [
        "s.yaml:5:14: error[spec.env-unset] the environment variable `NOT_SET_HERE` is not set; "
        "set it, or give a default: `${NOT_SET_HERE:default}`"
    ]


@pytest.mark.parametrize("text", ["${1x}", "${}", "${a b}", "${open"])
def test_what_is_no_variable(text: str) -> None:
    (line,) = errors(write("s.yaml", GOOD + f"description: '{text}'\n"))
    assert line == (
        f"s.yaml:5:14: error[spec.env] `{text}` names no environment variable; "
        "write `${NAME}` or `${NAME:default}`; a literal `${` is `$${`"
    )


def test_a_variable_that_was_overridden_need_not_be_set() -> None:
    os.environ.pop("NOT_SET_HERE", None)
    loaded = load(GOOD + "description: ${NOT_SET_HERE}\n", "description=given")
    assert loaded.spec.description == "given"


def test_a_wrong_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNS", "many")
    assert errors(write("s.yaml", GOOD + "limits: {user_turns: '${TURNS}'}\n")) == [
        "s.yaml:5:22 (${TURNS}): error[spec.wrong-type] `limits.user_turns` must be a whole number; it is `${TURNS}`"
    ]


def test_a_variable_cannot_bring_structure_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXT", "{a: 1}")
    assert load(GOOD + "user: {use: a:b, with: {x: '${TEXT}'}}\n").data["user"]["with"] == {"x": "{a: 1}"}


def test_overrides_reach_everywhere_and_are_read_as_yaml() -> None:
    loaded = load(
        GOOD + "tools:\n  - {use: a:b}\n  - {use: c:d}\n",
        "limits.user_turns=2",
        "tools.1.timeout=500ms",
        "sampling.stop=[x, 'y']",
        "user.use=e:f",
        "model.revision=0123",
        "description=a=b",
    )
    assert loaded.spec.limits == LimitsSpec(user_turns=2)
    assert [tool.timeout for tool in loaded.spec.tools] == [None, 0.5]
    assert loaded.spec.sampling.stop == ["x", "y"]
    assert loaded.spec.user is not None
    assert loaded.spec.model.revision == "0123"
    assert loaded.spec.description == "a=b"
    assert loaded.origin(("tools", 1, "timeout")) == Origin("--set", 1, 17, "--set tools.1.timeout=500ms")


def test_the_last_override_wins() -> None:
    assert load(GOOD, "name=a", "name=b").spec.name == "b"


def test_an_override_can_take_a_value_away() -> None:
    assert load(GOOD + "user: {use: a:b}\n", "user=").spec.user is None


def test_another_kind_by_override_drops_what_belonged_to_the_old() -> None:
    loaded = load(GOOD + "backend: {kind: local, max_batch: 8}\n", "backend.kind=scripted", "backend.replies=[a]")
    assert loaded.spec.backend == ScriptedBackendSpec(replies=["a"])


def test_another_source_of_tasks_keeps_what_every_source_has() -> None:
    text = GOOD.partition("tasks:")[0] + "tasks: {source: jsonl, path: a.jsonl, map: {q: question}, limit: 3}\n"
    loaded = load(text, "tasks.source=hub", "tasks.path=org/set", "tasks.split=test")
    assert loaded.data["tasks"] == {
        "source": "hub",
        "map": {"q": "question"},
        "limit": 3,
        "path": "org/set",
        "split": "test",
    }


def test_an_override_may_name_a_preset() -> None:
    loaded = load(GOOD + "machine: tools\n", "machine=single_turn", "machine.initial=PENDING")
    assert (loaded.spec.machine.preset, loaded.spec.machine.initial) == ("single_turn", "PENDING")


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "limits.usr_turns=2",
            "--set limits.usr_turns=2: error[spec.unknown-key] unknown key `usr_turns`; did you mean `user_turns`?",
        ),
        (
            "limts.user_turns=2",
            "--set limts.user_turns=2: error[spec.unknown-key] unknown key `limts`; did you mean `limits`?",
        ),
        ("name", "--set name: error[spec.set] `name` is no override; write `--set a.b=value`"),
        ("a..b=1", "--set a..b=1: error[spec.set] `a..b=1` is no override; write `--set a.b=value`"),
        ("name.x=1", "--set name.x=1: error[spec.set] `name` is a single value and has no `x`; set `name` whole"),
        (
            "tasks.rows.1.a=1",
            "--set tasks.rows.1.a=1: error[spec.set] `tasks.rows` is a list and has no item `1`; its items are 0 to 0; set the list whole",
        ),
        (
            "tasks.rows.x=1",
            "--set tasks.rows.x=1: error[spec.set] `tasks.rows` is a list and has no item `x`; its items are 0 to 0; set the list whole",
        ),
        (
            "limits.user_turns=two",
            "--set limits.user_turns=two: error[spec.wrong-type] `limits.user_turns` must be a whole number; it is `two`",
        ),
        (
            "sampling.stop=[a",
            "--set sampling.stop=[a: error[spec.set] the value is no YAML: while parsing a flow sequence: did not find expected ',' or ']'; quote it",
        ),
    ],
)
def test_wrong_overrides_are_named(override: str, error: str) -> None:
    assert errors(write("s.yaml", GOOD), override) == [error]
