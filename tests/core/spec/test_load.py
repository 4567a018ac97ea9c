"""A spec file becomes a valid EpisodeSpec, or every error with its place and its fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_files import GOOD, errors, load, write

from engine.errors import SpecError
from engine.plugin import installed
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.backend import backend_classes
from engine.schemas.limits import LimitsSpec
from engine.spec.load import load_document, load_spec, read_spec
from engine.spec.text.diagnostic import Origin

pytestmark = pytest.mark.usefixtures("in_folder")
AGENT = ", agent" if "agents" in installed().plugins else ""
"""The preset that the plugin agents adds, as messages have it."""
KINDS = ", ".join(each.kind_name() for each in backend_classes())


# ---- form


def test_a_good_spec_loads_with_defaults_and_positions() -> None:
    loaded = load(GOOD)
    assert loaded.spec.name == "demo"
    assert isinstance(loaded.spec.backend, LocalBackendSpec)
    assert loaded.spec.machine.preset == "tools_and_user"
    assert loaded.origin(("model", "path")) == Origin("s.yaml", 3, 15)
    assert loaded.origin(("model", "path"), key=True) == Origin("s.yaml", 3, 9)
    assert loaded.origin(("limits", "user_turns")) == Origin("s.yaml", 1, 1)
    assert loaded.path == Path.cwd() / "s.yaml"
    assert loaded.base == Path.cwd()


def test_every_error_comes_in_one_go_with_place_rule_and_fix() -> None:
    write(
        "s.yaml",
        """\
spec: episode/v1
name: demo
model: {pth: smollm2}
backend:
  kind: local
  max_batch: "8"
  dtype: f32
tasks: {source: jsonl}
temperature: 1.0
tools:
  - engine.environments.tools.calculator:calculate
  - {use: a:b, timout: 5s, with_: {}}
machine:
  preset: toolz
  states:
    A: {final: yes}
  transitions:
    - {trigger: 5, source: [a, 3], dest: x}
rewards:
  reassign:
    - {at: A, op: tranfer, to: -1}
    - {at: A, turn: lst, share: 2}
    - {at: A}
    - {at: A, op: add, share: 0.5, value: 1}
sampling: {temperature: hot, top_k: 5.0, stop: [""], logit_bias: {"5": x}}
limits:
  episode_seconds: 5 parsecs
  user_turns: 0
  tool_seconds: .nan
prompt: {a: 1}
user: x.y:Z
""",
    )
    assert errors("s.yaml") == [
        "s.yaml:3:1: error[spec.missing-key] `model` needs `path`; add `path: …` "
        "(A folder, a hub id, or a name in the catalogue (`engine models` lists it))",
        "s.yaml:3:9: error[spec.unknown-key] unknown key `pth`; did you mean `path`?",
        "s.yaml:6:14: error[spec.wrong-type] `backend.max_batch` must be a whole number; it is `8`; write 8 without quotes",
        "s.yaml:7:10: error[spec.bad-value] `backend.dtype` must be one of auto, float32, bfloat16, float16; it is `f32`; "
        "did you mean `float32`?",
        "s.yaml:8:9: error[spec.bad-value] `tasks`: `source: jsonl` needs `path`",
        "s.yaml:9:1: error[spec.unknown-key] unknown key `temperature`; `temperature` belongs under `sampling`",
        "s.yaml:11:5: error[spec.wrong-type] `tools[0]` must be a mapping; it is `engine.environments.tools.calculator:calculate`; "
        "write `{use: engine.environments.tools.calculator:calculate}`",
        "s.yaml:12:16: error[spec.unknown-key] unknown key `timout`; did you mean `timeout`?",
        "s.yaml:12:28: error[spec.unknown-key] unknown key `with_`; did you mean `with`?",
        "s.yaml:14:11: error[spec.bad-value] `machine.preset` must be one of single_turn, tools, tools_and_user, "
        f"retry_with_feedback, step, tools_and_step{AGENT}; it is `toolz`; did you mean `tools`?",
        "s.yaml:16:16: error[spec.wrong-type] `machine.states.A.final` must be true or false; it is `yes`; write true",
        "s.yaml:18:17: error[spec.wrong-type] `machine.transitions[0].trigger` must be a string, or a list of strings; it is 5; "
        'quote it: "5"',
        's.yaml:18:32: error[spec.wrong-type] `machine.transitions[0].source[1]` must be a string; it is 3; quote it: "3"',
        "s.yaml:21:19: error[spec.bad-value] `rewards.reassign[0].op` must be one of add, set, transfer; it is `tranfer`; "
        "did you mean `transfer`?",
        "s.yaml:21:32: error[spec.bad-value] `rewards.reassign[0].to` must be at least 0, or one of first, second, previous, "
        "last, all, each, or a mapping; it is -1",
        "s.yaml:22:21: error[spec.bad-value] `rewards.reassign[1].turn` must be a whole number, or one of first, second, "
        "previous, last, all, each, or a mapping; it is `lst`; did you mean `last`?",
        "s.yaml:22:33: error[spec.bad-value] `rewards.reassign[1].share` must be at most 1; it is 2",
        "s.yaml:23:7: error[spec.bad-value] `rewards.reassign[2]`: a transfer needs `to`: the turn that receives",
        "s.yaml:24:24: error[spec.bad-value] `rewards.reassign[3]`: `to` and `share` belong to a transfer, not to `add`",
        "s.yaml:25:25: error[spec.wrong-type] `sampling.temperature` must be a number; it is `hot`",
        "s.yaml:25:37: error[spec.wrong-type] `sampling.top_k` must be a whole number; it is 5.0; write 5",
        "s.yaml:25:48: error[spec.bad-value] `sampling.stop`: an empty stop string would end every reply at once; remove it",
        "s.yaml:25:72: error[spec.wrong-type] `sampling.logit_bias.5` must be a number; it is `x`",
        "s.yaml:27:20: error[spec.bad-value] `limits.episode_seconds`: '5 parsecs' is not a duration; "
        "write 500ms, 5s, 2m, 1h or seconds",
        "s.yaml:28:15: error[spec.bad-value] `limits.user_turns` must be at least 1; it is 0",
        "s.yaml:29:17: error[spec.bad-value] `limits.tool_seconds` must be a finite number; it is nan",
        "s.yaml:30:1: error[spec.bad-value] `prompt`: it must be a list of messages, or `{field: messages}`; write `- role: …` for each message",
        "s.yaml:31:7: error[spec.wrong-type] `user` must be a mapping; it is `x.y:Z`; write `user: {use: x.y:Z}`",
    ]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (
            "backend: {kind: scriptd, replies: [a]}",
            "s.yaml:5:17: error[spec.bad-value] `backend.kind` must be one of KINDS; it is `scriptd`; "
            "did you mean `scripted`?",
        ),
        (
            "backend: {device: cpu}",
            "s.yaml:5:1: error[spec.missing-key] `backend` needs `kind`; add `kind: …`, one of KINDS",
        ),
        ("backend: local", "s.yaml:5:10: error[spec.wrong-type] `backend` must be a mapping; it is `local`"),
        (
            "backend: {kind: local, local: 1}",
            "s.yaml:5:24: error[spec.unknown-key] unknown key `local`; known here: kind, device, dtype, deterministic, max_batch, threads, routed_experts",
        ),
        (
            "limits: {user_turns: yes}",
            "s.yaml:5:22: error[spec.wrong-type] `limits.user_turns` must be a whole number; it is `yes`",
        ),
        (
            "limits: {user_turns: true}",
            "s.yaml:5:22: error[spec.wrong-type] `limits.user_turns` must be a whole number; it is true",
        ),
        (
            "limits: {episode_tokens: 1e5}",
            "s.yaml:5:26: error[spec.wrong-type] `limits.episode_tokens` must be a whole number; it is 100000.0; write 100000",
        ),
        (
            "description: 5",
            's.yaml:5:14: error[spec.wrong-type] `description` must be a string; it is 5; quote it: "5"',
        ),
        ("machine: []", "s.yaml:5:10: error[spec.wrong-type] `machine` must be a mapping; it is an empty list"),
        (
            "extnds: a.yaml",
            "s.yaml:5:1: error[spec.unknown-key] unknown key `extnds`; did you mean `extends`?",
        ),
    ],
)
def test_single_errors(lines: str, error: str) -> None:
    assert errors(write("s.yaml", GOOD + lines + "\n")) == [error.replace("KINDS", KINDS)]


def test_problems_of_form_and_of_content_come_together() -> None:
    write("s.yaml", GOOD + "name: again\nlimits: {x: 1}\n")
    assert [line.partition("] ")[0] for line in errors("s.yaml")] == [
        "s.yaml:5:1: error[yaml.duplicate-key",
        "s.yaml:6:10: error[spec.unknown-key",
    ]


def test_load_spec_raises_all_of_them() -> None:
    write("s.yaml", GOOD + "a1: 1\nb1: 2\n")
    with pytest.raises(SpecError) as caught:
        load_spec("s.yaml")
    assert [problem.path for problem in caught.value.diagnostics] == [("a1",), ("b1",)]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "s.yaml:1:1: error[spec.empty] `s.yaml` is empty; begin with `spec: episode/v1`"),
        (b"# nothing\n", "s.yaml:1:1: error[spec.empty] `s.yaml` is empty; begin with `spec: episode/v1`"),
        (
            b"- a\n",
            "s.yaml:1:1: error[spec.wrong-type] a spec is a mapping of keys to values; begin with `spec: episode/v1`",
        ),
        (b"name: \xff\n", "s.yaml:1:1: error[spec.unreadable] `s.yaml` is not UTF-8 (byte 6); save it as UTF-8"),
    ],
)
def test_files_that_hold_no_spec(content: bytes, error: str) -> None:
    Path("s.yaml").write_bytes(content)
    assert errors("s.yaml") == [error]


def test_a_missing_file_names_the_nearest() -> None:
    write("specs/quickstart.yaml", GOOD)
    assert errors("specs/quickstrt.yaml") == [
        "specs/quickstrt.yaml:1:1: error[spec.unreadable] `specs/quickstrt.yaml` cannot be read: No such file or directory; "
        "did you mean `specs/quickstart.yaml`?"
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    Path("s.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_spec("s.yaml").origin(("spec",)) == Origin("s.yaml", 1, 7)


# ---- where files are


def test_a_path_is_relative_to_the_file_that_it_is_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    write("lib/base.yaml", GOOD + "backend: {kind: scripted, replies: r.yaml}\n")
    write("specs/s.yaml", "extends: ../lib/base.yaml\nmodel: {chat_template: t.jinja}\n")
    loaded = load_spec("specs/s.yaml", ["model.tokenizer=tok"])
    assert loaded.resolve("r.yaml", ("backend", "replies")) == here / "lib/r.yaml"
    assert loaded.resolve("t.jinja", ("model", "chat_template")) == here / "specs/t.jinja"
    assert loaded.resolve("tok", ("model", "tokenizer")) == here / "tok"
    assert loaded.resolve("any.txt") == here / "specs/any.txt"
    assert loaded.resolve("/abs/x") == Path("/abs/x")
    monkeypatch.setenv("HOME", "/home/someone")
    assert loaded.resolve("~/x") == Path("/home/someone/x")


def test_a_character_inside_a_value_has_a_place() -> None:
    loaded = load(
        GOOD
        + "rewards:\n  reassign:\n"
        + "    - {at: A, op: add, value: 1, when: a && b}\n"
        + '    - {at: A, op: add, value: 1, when: "a && b"}\n'
        + "    - at: A\n      op: add\n      value: 1\n      when: >-\n        a &&\n        b\n"
        + "    - at: A\n      op: add\n      value: 1\n      when: a &&\n        b\n"
    )
    places = [loaded.inside(("rewards", "reassign", index, "when"), 5) for index in range(4)]
    assert [(place.line, place.column) for place in places] == [(7, 45), (8, 46), (14, 9), (19, 9)]


def test_other_documents_are_read_by_the_same_rules() -> None:
    write("limits.yaml", "user_turns: 3\ntool_seconds: 5s\n")
    limits, document = load_document("limits.yaml", LimitsSpec)
    assert (limits.user_turns, limits.tool_seconds) == (3, 5.0)
    assert document.origin(("tool_seconds",)) == Origin("limits.yaml", 2, 15)
    write("limits.yaml", "user_trns: 3\n")
    with pytest.raises(SpecError) as caught:
        load_document("limits.yaml", LimitsSpec)
    assert str(caught.value) == (
        "limits.yaml:1:1: error[spec.unknown-key] unknown key `user_trns`; did you mean `user_turns`?"
    )


# ---- never a traceback

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["${A}", "${A:1}", "$${", "tools", "5s"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["use", "with", "kind", "path", "at", "from", "rows", "source", "x", "extends"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)
KEYS = [
    "spec",
    "name",
    "model",
    "backend",
    "sampling",
    "tasks",
    "prompt",
    "environment",
    "tools",
    "user",
    "machine",
    "limits",
]
KEYS += ["rewards", "recover", "rollout", "extends", "zzz"]


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=8), st.lists(st.text(max_size=12), max_size=2))
def test_no_document_raises(document: dict[str, object], overrides: list[str]) -> None:
    Path("fuzz.yaml").write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8", errors="replace")
    loaded, problems = read_spec("fuzz.yaml", overrides)
    assert (loaded is None) == any(problem.severity == "error" for problem in problems)
    for problem in problems:
        assert problem.origin is not None


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_no_bytes_raise(content: bytes) -> None:
    Path("fuzz.yaml").write_bytes(content)
    loaded, problems = read_spec("fuzz.yaml")
    assert loaded is None
    assert problems
