"""`engine graph` draws a spec's machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import typer
from journals import write_result
from typer.testing import CliRunner, Result

from engine.plugins.pictures.command import graph
from engine.schemas.environment import Task
from engine.schemas.trajectory import Outcome, Trajectory
from engine.store import RunHeader, RunStore

app = typer.Typer()
app.command()(graph)

SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
machine: MACHINE
"""

TOOLS = """\
stateDiagram-v2
    state "PENDING<br/>reset" as PENDING
    state "GENERATING<br/>generate" as GENERATING
    state "AWAITING_TOOL<br/>call_tools" as AWAITING_TOOL
    state "DONE<br/>score" as DONE
    state "any state" as any_state
    [*] --> PENDING
    PENDING --> GENERATING : ready
    GENERATING --> AWAITING_TOOL : tool_calls<br/>malformed
    GENERATING --> DONE : answered<br/>truncated<br/>aborted
    AWAITING_TOOL --> GENERATING : results
    any_state --> DONE : limit<br/>failed
    DONE --> [*]
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(SPEC.replace("MACHINE", "tools"))


def engine_graph(*args: str) -> Result:
    return CliRunner().invoke(app, ["demo.yaml", *args])


def test_mermaid_goes_to_the_terminal() -> None:
    result = engine_graph()
    assert (result.exit_code, result.output) == (0, TOOLS)


def test_a_value_can_be_overridden() -> None:
    result = engine_graph("--set", "machine=single_turn")
    assert result.exit_code == 0
    assert (
        "    GENERATING --> DONE : answered<br/>tool_calls<br/>malformed<br/>truncated<br/>aborted\n" in result.output
    )


def test_an_action_of_the_specs_own_may_meet_anything() -> None:
    own = (
        "{preset: tools, states: {EXTRA: {action: 'mod:act'}}, transitions: [{trigger: x, source: EXTRA, dest: DONE}]}"
    )
    Path("demo.yaml").write_text(SPEC.replace("MACHINE", own))
    lines = engine_graph().output.splitlines()
    assert "    EXTRA --> DONE : x<br/>truncated<br/>aborted" in lines
    assert "    AWAITING_TOOL --> GENERATING : results" in lines


def test_a_spec_that_is_wrong_is_told_with_its_place() -> None:
    Path("demo.yaml").write_text(SPEC.replace("MACHINE", "tolls"))
    result = engine_graph()
    assert result.exit_code == 1
    assert result.output.startswith("demo.yaml:5:10: error[")
    assert "did you mean `tools`?" in result.output


def test_a_folder_that_cannot_be_written_is_told() -> None:
    Path("taken").write_text("a file")
    result = engine_graph("--out", "taken/machine.mmd")
    assert result.exit_code == 1
    assert result.output.startswith("cannot write taken/machine.mmd: ")


async def fill(out: Path) -> None:
    header = RunHeader(run_id="demo-1", name="demo", created=0.0, engine_version="0", spec={})
    task = Task(id="t", index=0, fields={})
    with RunStore.create(out, header) as store:
        for sample in range(2):
            begun = await store.begin(task, sample)
            await write_result(
                begun,
                Trajectory(
                    run_id="demo-1",
                    episode_id=f"t/{sample}",
                    task_id="t",
                    sample_index=sample,
                    seed=1,
                    history="branch",
                    outcome=Outcome(state="DONE", event="answered"),
                    messages=[],
                    turns=[],
                    branches=[],
                    path=[
                        ("PENDING", "ready", "GENERATING"),
                        *[("GENERATING", "tool_calls", "AWAITING_TOOL"), ("AWAITING_TOOL", "results", "GENERATING")]
                        * sample,
                        ("GENERATING", "answered", "DONE"),
                    ],
                ),
            )


def test_a_runs_transitions_are_counted() -> None:
    asyncio.run(fill(Path("runs")))
    result = engine_graph("--run", "latest")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "    PENDING --> GENERATING : ready ×2" in lines
    assert "    GENERATING --> AWAITING_TOOL : tool_calls ×1<br/>malformed ×0" in lines
    assert "    GENERATING --> DONE : answered ×2<br/>truncated ×0<br/>aborted ×0" in lines


def test_a_run_that_is_not_there_is_told() -> None:
    result = engine_graph("--run", "nothing")
    assert result.exit_code == 1
    assert "nothing" in result.output
