"""Objects and classes of a program, as of a notebook's cell, in place of entry points."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installed_plugins import needs_plugin

import engine
from engine import EpisodeView, Message, Reset, RewardEvent, Step, Task, UserTurn, action
from engine.environments.sums import Coach
from engine.given import use_of
from engine.validate import check_spec

REPLIES = ["It is 41.", "It is 42."]
"""Of an episode that has no tools."""


def cell() -> dict[str, object]:
    """What a cell defines: no module has it."""

    class Lamp:
        """An environment whose objects have a state."""

        events = ("continue", "done")

        def __init__(self, needed: int = 2) -> None:
            self.needed = needed
            self.steps = 0

        def reset(self, task: Task, seed: int) -> Reset:
            return Reset(messages=[Message(role="user", content="Light it.")])

        def step(self, view: EpisodeView) -> Step:
            self.steps += 1
            if self.steps < self.needed:
                return Step(event="continue", messages=[Message(role="user", content="Once more.")])
            return Step(event="done", rewards=[RewardEvent(value=float(self.steps))])

    class Clerk:
        def respond(self, view: EpisodeView) -> UserTurn:
            return UserTurn(content="Thanks.", satisfied=True, rewards=[RewardEvent(name="said", value=0.5)])

    def bonus(view: EpisodeView) -> list[RewardEvent]:
        return [RewardEvent(name="length", value=float(len(view.reply)))]

    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    @action("done")
    def judge(view: EpisodeView) -> Step:
        return Step(event="done", rewards=[RewardEvent(name="judged", value=1.0)])

    return {"Lamp": Lamp, "Clerk": Clerk, "bonus": bonus, "double": double, "judge": judge}


@pytest.fixture
def plain(make_spec: Callable[..., Path]) -> Path:
    tasks = {"source": "inline", "rows": [{"id": "a"}, {"id": "b"}], "id": "id"}
    return make_spec(REPLIES, tasks=tasks, user=None, tools=None, machine="single_turn")


def test_a_class_and_an_object_of_it_begin_anew_in_each_episode(plain: Path, tmp_path: Path) -> None:
    lamp = cell()["Lamp"]
    for given, steps in ((lamp, 2), (lamp(needed=1), 1)):
        spec = engine.load(plain, environment=given, machine="step")
        run = engine.run(spec, out=tmp_path, progress=False)
        assert [episode.reward for episode in run.episodes] == [float(steps)] * 2
        assert run.episode("a/0").messages[1].text == "Light it."
    assert spec.spec.environment.use == "engine.given:Lamp_2"
    assert use_of(lamp) == "engine.given:Lamp"


def test_a_user_tools_and_a_scorer_are_given(plain: Path, tmp_path: Path) -> None:
    given = cell()
    call = {"tool_calls": [{"name": "double", "arguments": {"number": 21}}]}
    spec = engine.load(
        plain,
        {"backend.replies": [call, "It is 42."]},
        machine="tools_and_user",
        user=given["Clerk"],
        tools=[given["double"]],
        scorer=given["bonus"],
    )
    episode = engine.run(spec, out=tmp_path, progress=False).episodes[0]
    assert [message.text for message in episode.messages if message.role == "tool"] == ["42"]
    assert episode.trajectory.outcome.rewards == {"said": 0.5, "length": 9.0}


def test_a_machine_may_have_functions_as_actions(plain: Path, tmp_path: Path) -> None:
    machine = {
        "states": {
            "BEGIN": {"action": "reset"},
            "WRITING": {"action": "generate"},
            "JUDGING": {"action": cell()["judge"]},
            "END": {"final": True},
        },
        "initial": "BEGIN",
        "transitions": [
            {"trigger": "ready", "source": "BEGIN", "dest": "WRITING"},
            {"trigger": ["answered", "truncated", "malformed"], "source": "WRITING", "dest": "JUDGING"},
            {"trigger": "done", "source": "JUDGING", "dest": "END"},
            {"trigger": ["tool_calls", "aborted"], "source": "*", "dest": "END"},
        ],
    }
    run = engine.run(engine.load(plain, machine=machine), out=tmp_path, progress=False)
    assert [episode.reward for episode in run.episodes] == [1.0, 1.0]


def test_what_can_be_imported_has_its_own_entry_point() -> None:
    assert use_of(Coach) == "engine.environments.sums:Coach"
    first, second = cell()["Clerk"], cell()["Clerk"]
    assert use_of(first) == use_of(first) != use_of(second)


def test_worker_processes_are_refused_with_the_fix(plain: Path) -> None:
    clerk = cell()["Clerk"]
    spec = engine.load(plain, {"isolation.mode": "process"}, machine="tools_and_user", user=clerk)
    name = spec.spec.user.use.partition(":")[2]
    (found,) = [item for item in check_spec(spec) if item.severity == "error"]
    assert (found.rule, found.path) == ("code.given", ("user", "use"))
    assert found.message == f"`{name}` belongs to the program that gave it, and worker processes cannot import it"
    assert found.fix == (
        f"put it into a module beside the spec and write `module:{name}`, or write `isolation: {{mode: thread}}`"
    )


@needs_plugin("drivers")
def test_several_drivers_are_refused_with_the_fix(plain: Path) -> None:
    spec = engine.load(plain, {"rollout.drivers": 2}, machine="tools_and_user", user=cell()["Clerk"])
    name = spec.spec.user.use.partition(":")[2]
    found = [item for item in check_spec(spec) if item.severity == "error"]
    assert [(item.rule, item.path, item.fix) for item in found] == [
        (
            "rollout.drivers",
            ("user", "use"),
            f"put it into a module and write `module:{name}`, or set `rollout.drivers: 1`",
        )
    ]


def test_the_process_that_gave_the_object_cannot_resume_either(plain: Path, tmp_path: Path) -> None:
    clerk = cell()["Clerk"]
    name = use_of(clerk).partition(":")[2]
    run = engine.run(engine.load(plain, machine="tools_and_user", user=clerk), out=tmp_path, progress=False)
    with pytest.raises(engine.EngineError) as raised:
        engine.run(resume=run.folder, progress=False)
    assert str(raised.value) == (
        f"{run.id} cannot go on: the object `{name}` belongs to this process alone; put it into a module beside the "
        f"spec and write `module:{name}`"
    )


@pytest.mark.parametrize("command", [["run", "--resume"], pytest.param(["replay"], marks=needs_plugin("replay"))])
def test_another_process_refuses_the_run_with_the_fix(plain: Path, tmp_path: Path, command: list[str]) -> None:
    class Porter(cell()["Clerk"]):
        """Given in this test alone."""

    name = use_of(Porter).partition(":")[2]
    run = engine.run(engine.load(plain, machine="tools_and_user", user=Porter), out=tmp_path, progress=False)
    code = f"import sys; from engine.cli.main import app; app({[*command, str(run.folder)]!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"{run.id} cannot go on: the object `{name}` was given by another process, which alone has it; put it into a "
        f"module beside the spec and write `module:{name}`"
    )
