"""What a run says while it runs: turns before the first episode ends, remaining time, failures by cause, shares of limits."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from itertools import islice
from threading import Event

import pytest
from rich.console import Console
from store_kit import make_trajectory

from engine.api.progress import RunPanel, TrainPanel, duration, endings, pauses, ticking
from engine.runner import counters
from engine.runner.counters import RunCounters
from engine.runner.summary import RunSummary
from engine.schemas.trajectory import Failure, Outcome, Trajectory


class Clock:
    """A clock that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(counters.time, "perf_counter", made)
    return made


def ended(turns: int, **outcome: object) -> Trajectory:
    made = make_trajectory(branches=turns)
    return replace(made, outcome=Outcome(**{"state": "DONE", "event": "answered", "reward": 0.5} | outcome))  # type: ignore[arg-type]


def failure(kind: str, blame: str) -> Failure:
    return Failure(kind=kind, blame=blame, message="m")  # type: ignore[arg-type]


def test_before_the_first_episode_ends_the_line_has_turns(clock: Clock) -> None:
    live, summary = RunCounters(total=128, began=clock.now), RunSummary()
    live.states.update({"GENERATING": 60, "AWAITING_TOOL": 4})
    live.turns, live.tokens = 42, 1_000
    clock.now += 21
    assert RunPanel(live, summary).line() == (
        "0/128 episodes · 42 turns · 2.0 turns/s · 48 tokens/s · GENERATING=60 AWAITING_TOOL=4"
    )


def test_the_line_has_remaining_time_failures_and_limits(clock: Clock) -> None:
    live, summary = RunCounters(total=20, before=2, began=clock.now), RunSummary()
    for made in (
        ended(4), ended(2, limit="assistant_turns"), ended(4, failure=failure("tool_timeout", "tool")), ended(2, limit="assistant_turns"),
    ):  # fmt: skip
        summary.add(made)
        live.end(made)
    live.states.update({"GENERATING": 4})
    live.turns, live.tokens = 20, 400
    clock.now += 10
    # 10 episodes of 3 turns have not begun; 4 have half of 5 turns left: 40 turns at 2 turns/s
    assert live.eta == 20.0
    assert RunPanel(live, summary).line() == (
        "4/20 episodes · 20 turns · 2.0 turns/s · 40 tokens/s · 20 s left · mean reward 0.500 · "
        "1 failed: tool_timeout (tool) 1 · ended by limits: assistant_turns 50% · GENERATING=4"
    )
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(RunPanel(live, summary))
    shown = console.export_text()
    for part in (
        "4/20 episodes",
        "10 s · 20 s left",
        "2.0 turns/s",
        "tool_timeout (tool) 1",
        "assistant_turns 50%",
        "GENERATING 4",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("total", "turns", "made", "running", "eta"),
    [
        (4, [2, 2], 4, 2, 10.0),  # the two others are as long
        (4, [2, 2], 8, 2, 5.0),  # they are longer
        (3, [1] * 2, 2, 1, 5.0),
        (40, [2, 2], 40, 38, None),  # too few are finished
        (2, [2, 2], 4, 0, None),  # none is left
        (4, [], 3, 4, None),  # none is finished
        (4, [0, 0], 0, 2, 10.0),  # failed before their first turn
    ],
)  # fmt: skip
def test_the_remaining_time_counts_the_turns_that_are_left(
    clock: Clock, total: int, turns: list[int], made: int, running: int, eta: float | None
) -> None:
    live = RunCounters(total=total, began=clock.now)
    live.states["GENERATING"] = running
    for count in turns:
        live.end(ended(count))
    live.turns = made
    clock.now += 10
    assert live.eta == eta


def test_many_causes_are_cut() -> None:
    live = RunCounters(total=9)
    for kind in "abcd":
        live.end(ended(1, failure=failure(kind, "user")))
    live.end(ended(1, failure=failure("c", "user")))
    assert endings(live) == ["5 failed: c (user) 2, a (user) 1, b (user) 1, …"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7_500, "2 h 5 min"), (7_200, "2 h"), (370_000, "4 d 6 h")],
)  # fmt: skip
def test_durations_have_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_lines_come_soon_and_then_seldom() -> None:
    assert list(islice(pauses(), 16)) == [2.0, *[5.0] * 12, 30.0, 30.0, 30.0]


def test_a_line_is_said_while_other_code_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.progress._FIRST", 0.001)
    said = Event()
    lines: list[str] = []
    with ticking(lambda: "here", lambda line: (lines.append(line), said.set())):
        assert said.wait(10)
    assert lines[0] == "here"
    count = len(lines)
    time.sleep(0.01)
    assert len(lines) == count


def test_a_training_says_what_runs_between_two_steps(clock: Clock) -> None:
    panel = TrainPanel(steps=4)
    assert panel.line() == "step 1/4 · loading"
    panel.phase("rollout")
    panel.live = RunCounters(total=64, began=clock.now)
    panel.live.end(ended(2, limit="context"))
    panel.live.states["GENERATING"] = 7
    panel.live.turns = 30
    clock.now += 10
    assert panel.line() == (
        "step 1/4 · rollout · 1 finished · 30 turns · 3.0 turns/s · 0 tokens/s · ended by limits: context 100% · GENERATING=7"
    )
    assert panel.eta is None
    panel.update(1, {"time/rollout": 60.0, "time/update": 30.0})
    assert panel.eta == 270.0
    assert panel.step_line() == "step 1/4 · 4 min left"
    panel.live.end(replace(ended(4), turns=[replace(turn, event="truncated") for turn in ended(1).turns] * 4))
    panel.update(2, {"time/rollout": 60.0})
    assert panel.step_line() == "step 2/4 · cut 100% · 2 min left"
    panel.update(4, {"time/rollout": 60.0})
    assert (panel.eta, panel.line()) == (None, None)
