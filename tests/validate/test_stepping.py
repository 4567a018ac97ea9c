"""Environments whose state a resume would lose, and tools that nothing calls: found with and without imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.spec.access import Access
from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
limits: {assistant_turns: 4}
"""
CODE = """\
import engine.environments.function as function
from engine.environments.function import AsyncDialogue, Answer, Dialogue, End, Say, environment
from engine.schemas.environment import EpisodeView, Reset, Step, Task

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

@environment
def turns(task: Task, seed: int, most: int = 3, *, hint: str = "") -> Dialogue:
    yield "x"

@environment
async def async_turns() -> AsyncDialogue:
    yield "x"

@environment()
def plain(view: EpisodeView | None, task: Task, most: int) -> Answer:
    def inner():
        yield 1
    return "x"

@function.environment(tools=[add])
def tooled(view: EpisodeView | None) -> Answer:
    return "x"

@environment(tools=[add])
def own_calls(view: EpisodeView | None) -> Answer:
    return "x" if view is None else str(len(view.calls))

class Game:
    events = ("continue", "done")
    def reset(self, task, seed): return Reset()
    def step(self, view): return Step(event="done")
"""


def found(folder: Path, environment: str, lines: str = "machine: step", *, imports: bool) -> list[str]:
    (folder / "stepping_code.py").write_text(CODE)
    (folder / "s.yaml").write_text(f"{HEAD}environment: {environment.replace('code:', 'stepping_code:')}\n{lines}\n")
    access = Access() if imports else Access(roots=(folder,), imports=False)
    items = check_spec(load_spec(folder / "s.yaml", access=access))
    return [
        f"{item.rule}: {item.message}" for item in items if item.rule.startswith(("code.", "tools.", "environment."))
    ]


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ('{use: "code:turns"}', []),
        ('{use: "code:turns", with: {most: 1, hint: a}}', []),
        ('{use: "code:plain", with: {most: 1}, effects: pure}', []),
        ('{use: "code:turns", with: {mots: 1}}', ["code.protocol: `stepping_code:turns` takes no argument `mots`"]),
        ('{use: "code:turns", with: {seed: 1}}', ["code.protocol: `stepping_code:turns` takes no argument `seed`"]),
        ('{use: "code:plain"}', ["code.protocol: `stepping_code:plain` needs the argument `most`"]),
        (
            '{use: "code:turns", with: {most: many}}',
            ['code.with-type: `stepping_code:turns` takes `most: int`; it is the text "many"'],
        ),
        *(
            (
                f'{{use: "code:{name}", effects: pure}}',
                [
                    f"environment.effects: `stepping_code:{name}` is a generator, which keeps its state between turns; "
                    "`pure` would lose it at a resume"
                ],
            )
            for name in ("turns", "async_turns")
        ),
    ],
)
def test_an_environment_of_one_function_is_checked_like_a_class(
    tmp_path: Path, environment: str, wanted: list[str], imports: bool
) -> None:
    assert found(tmp_path, environment, imports=imports) == wanted


NOT_CALLED = (
    "tools.not-called: no state calls the tools: a reply with a tool call goes to `STEPPING` like any other, and the model "
    "gets no result"
)
TOOLS = 'tools: [{use: "stepping_code:add"}]\n'


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize(
    ("use", "lines", "wanted"),
    [
        ("tooled", "machine: step", [NOT_CALLED]),
        ("turns", TOOLS + "machine: step", [NOT_CALLED]),
        ("Game", TOOLS + "machine: step", [NOT_CALLED]),
        ("tooled", "machine: tools_and_step", []),
        ("own_calls", "machine: step", []),
        ("turns", "machine: step", []),
        ("turns", TOOLS + "machine: single_turn", []),
    ],
)
def test_tools_that_no_state_calls(tmp_path: Path, use: str, lines: str, wanted: list[str], imports: bool) -> None:
    assert found(tmp_path, f'{{use: "code:{use}"}}', lines, imports=imports) == wanted


def test_a_decorator_of_the_same_name_from_elsewhere_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def environment(made):\n    return made\n")
    code = "from theirs import environment\n\n@environment\ndef build(view=None, **more):\n    yield 1\n"
    (tmp_path / "stepping_code2.py").write_text(code)
    line = 'environment: {use: "stepping_code2:build", with: {seed: 1}, effects: pure}\nmachine: single_turn\n'
    (tmp_path / "s.yaml").write_text(HEAD + line)
    items = check_spec(load_spec(tmp_path / "s.yaml", access=Access(roots=(tmp_path,), imports=False)))
    assert [item.rule for item in items if item.severity == "error"] == []
