"""Environments, tools and users import, have their methods, and can be called as the engine calls them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""

SPEC_CODE = """\
from engine.schemas.environment import EpisodeView, Step, action

class Good:
    events = ("done",)
    def __init__(self, size: int = 1, *, name: str = "x"): ...
    def reset(self, task, seed): ...
    def step(self, view): ...
    def tools(self): ...

class Loose:
    def __init__(self, **anything): ...
    def reset(self, *anything): ...

class Empty: ...

class NoSeed:
    def reset(self, task): ...
    def score(self): ...

class Needs:
    def __init__(self, size, path): ...
    @staticmethod
    def reset(task, seed): ...

class User:
    def respond(self, view): ...

class Mute:
    def __init__(self, patience=1): ...
    def respond(self): ...

class Tool:
    def __init__(self, k: int): ...
    def __call__(self, x: int) -> int:
        "Double it."

class NoCall:
    def __init__(self, k: int): ...

NUMBER = 5

def tool(x: int, view: EpisodeView) -> int:
    "Double it."
def untyped(x): ...
def make(size): ...
def scorer(view, scale=1.0): ...
def rows(n): ...

@action("condensed")
def condense(view, keep: int = 2) -> Step: ...

def no_events(view): ...
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("checked_code", None)
    Path("checked_code.py").write_text(SPEC_CODE)


def found(lines: str, machine: str = "single_turn") -> list[str]:
    Path("s.yaml").write_text(HEAD + lines + f"machine: {machine}\n")
    return [str(item).removeprefix("s.yaml:") for item in check_spec(load_spec("s.yaml")) if item.severity != "info"]


@pytest.mark.parametrize(
    "lines",
    [
        "environment: {use: 'checked_code:Good', with: {size: 2, name: y}}\n",
        "environment: {use: 'checked_code:Loose', with: {whatever: 2}}\n",
        "environment: {use: 'checked_code:Needs', with: {size: 2, path: y}}\n",
        "environment: {use: 'checked_code:make', with: {size: 2}}\n",
        "user: {use: 'checked_code:User'}\n",
        "tools: [{use: 'checked_code:tool'}, {use: 'checked_code:Tool', with: {k: 1}}]\n",
        "rewards: {scorer: {use: 'checked_code:scorer', with: {scale: 2.0}}}\n",
    ],
)
def test_code_that_fits(lines: str) -> None:
    assert found(lines) == []


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (
            "user: {use: 'checked_cod:User'}\n",
            [
                "6:13: error[code.import] `checked_cod:User`: there is no module `checked_cod`; did you mean `checked_code`?"
            ],
        ),
        (
            "environment: {use: 'checked_code:Good', with: {sizes: 1, 3d: 2}}\n",
            [
                "6:48: error[code.protocol] `checked_code:Good` takes no argument `sizes`; did you mean `size`?",
                "6:58: error[code.protocol] `checked_code:Good` takes no argument `3d`; known: name, size",
            ],
        ),
        (
            "environment: {use: 'checked_code:Needs', with: {size: 1}}\n",
            ["6:20: error[code.protocol] `checked_code:Needs` needs the argument `path`; add `with: {path: …}`"],
        ),
        (
            "environment: {use: 'checked_code:make'}\n",
            ["6:20: error[code.protocol] `checked_code:make` needs the argument `size`; add `with: {size: …}`"],
        ),
        (
            "environment: {use: 'checked_code:Empty'}\n",
            [
                "6:20: error[code.protocol] `checked_code:Empty` has no method `reset`, so it is not an environment; "
                "add `def reset(self, task, seed)`"
            ],
        ),
        (
            "environment: {use: 'checked_code:NoSeed'}\n",
            [
                "6:20: error[code.protocol] `checked_code:NoSeed.reset` cannot be called: too many positional arguments; "
                "it is called as `reset(task, seed)`",
                "6:20: error[code.protocol] `checked_code:NoSeed.score` cannot be called: too many positional arguments; "
                "it is called as `score(view)`",
            ],
        ),
        (
            "environment: {use: 'checked_code:NUMBER'}\n",
            [
                "6:20: error[code.protocol] `checked_code:NUMBER` cannot be called: it is an int; name a class or a function"
            ],
        ),
        (
            "user: {use: 'checked_code:Mute'}\n",
            [
                "6:13: error[code.protocol] `checked_code:Mute.respond` cannot be called: too many positional arguments; "
                "it is called as `respond(view)`"
            ],
        ),
        (
            "tools: [{use: 'checked_code:untyped'}]\n",
            ["6:15: error[code.protocol] tool `untyped`: give parameter `x` a type; the model is shown it"],
        ),
        (
            "tools: [{use: 'checked_code:tool', with: {x: 1}}]\n",
            [
                "6:36: error[code.protocol] `checked_code:tool` is a function: it takes its arguments from the model, not from "
                "`with`; make it a class that takes them and has `__call__`, or remove `with`"
            ],
        ),
        (
            "tools: [{use: 'checked_code:NoCall', with: {k: 1}}]\n",
            [
                "6:15: error[code.protocol] objects of `checked_code:NoCall` cannot be called, so it is not a tool; "
                "add `def __call__(self, …)` with typed parameters"
            ],
        ),
        (
            "tools: [{use: 'checked_code:NUMBER'}]\n",
            [
                "6:15: error[code.protocol] `checked_code:NUMBER` is an int, not a function; use a typed function or a class"
            ],
        ),
        (
            "rewards: {scorer: {use: 'checked_code:Good'}}\n",
            [
                "6:25: error[code.protocol] `checked_code:Good` is a class, and a function is called here; "
                "name a function that takes the view"
            ],
        ),
        (
            "rewards: {scorer: {use: 'checked_code:scorer', with: {scales: 1}}}\n",
            ["6:55: error[code.protocol] `checked_code:scorer` takes no argument `scales`; did you mean `scale`?"],
        ),
    ],
)
def test_code_that_does_not(lines: str, problems: list[str]) -> None:
    assert found(lines) == problems


def test_rows_in_python_are_called_with_what_they_take() -> None:
    lines = "tasks: {source: python, use: 'checked_code:rows', with: {m: 1}}\n"
    Path("s.yaml").write_text(
        HEAD.replace("tasks: {source: inline, rows: [{q: a}]}\n", lines) + "machine: single_turn\n"
    )
    assert [str(item) for item in check_spec(load_spec("s.yaml")) if item.severity != "info"] == [
        "s.yaml:4:30: error[code.protocol] `checked_code:rows` needs the argument `n`; add `with: {n: …}`",
        "s.yaml:4:58: error[code.protocol] `checked_code:rows` takes no argument `m`; known: n",
    ]


OWN = """
  preset: single_turn
  states:
    EXTRA: {{{state}}}
  transitions:
    - {{trigger: answered, source: GENERATING, dest: EXTRA}}
    - {{trigger: [{events}], source: EXTRA, dest: DONE}}
"""


def own(state: str, events: str, lines: str = "") -> list[str]:
    return found(lines, OWN.format(state=state, events=events).rstrip("\n"))


def test_an_action_of_ones_own() -> None:
    assert own("action: 'checked_code:condense', with: {keep: 3}", "condensed") == []
    assert own("action: step", "done", "environment: {use: 'checked_code:Good'}\n") == []


@pytest.mark.parametrize(
    ("state", "events", "lines", "problems"),
    [
        (
            "action: 'checked_code:condense', with: {kep: 3}",
            "condensed",
            "",
            ["9:53: error[code.action] `checked_code:condense` takes no argument `kep`; did you mean `keep`?"],
        ),
        (
            "action: step",
            "done",
            "",
            [
                "9:21: error[code.action] the action `step` asks the environment, and the spec has none; add `environment: {use: …}`"
            ],
        ),
        (
            "action: step",
            "done",
            "environment: {use: 'checked_code:Loose'}\n",
            [
                "10:21: error[code.action] the action `step` asks `checked_code:Loose`, which has no method `step`; "
                "add `def step(self, view) -> Step`",
                "10:21: error[code.action] `checked_code:Loose` declares no events for the action `step`; "
                'give it `events = ("done",)`: what its steps may answer',
            ],
        ),
        (
            "action: step",
            "dne",
            "environment: {use: 'checked_code:Good'}\n",
            [
                "13:18: error[machine.unknown-event] `EXTRA` never emits the event `dne`; did you mean `done`?",
                "10:5: error[machine.unhandled-event] `EXTRA` (step) may end with `done`, which leads nowhere; "
                "add `{trigger: done, source: EXTRA, dest: …}`",
            ],
        ),
    ],
)
def test_actions_that_do_not_fit(state: str, events: str, lines: str, problems: list[str]) -> None:
    assert own(state, events, lines) == problems


def test_an_environment_with_tools_is_enough_for_a_tool_state() -> None:
    assert found("environment: {use: 'checked_code:Good'}\n", "tools") == []
    assert len(found("environment: {use: 'checked_code:Needs', with: {size: 1, path: x}}\n", "tools")) == 1


def test_methods_that_the_class_does_not_show_are_no_mistake() -> None:
    Path("check_shown.py").write_text(
        "class Set:\n    def __init__(self):\n        self.respond = print\n"
        "class Computed:\n    @property\n    def respond(self):\n        return print\n"
        "class Asked:\n    def __getattr__(self, name):\n        return print\n"
    )
    sys.modules.pop("check_shown", None)
    for name in ("Set", "Computed", "Asked"):
        assert found(f"user: {{use: 'check_shown:{name}'}}\n", "retry_with_feedback") == []
