"""Which transitions are taken, told apart by their conditions, and which cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.plugins.scenarios.coverage import show_edge
from engine.plugins.scenarios.suite import SuiteResult

Write = Callable[..., Path]
Run = Callable[..., SuiteResult]
BOTH = {
    "initial": "PENDING",
    "states": {
        "PENDING": {"action": "reset"},
        "GENERATING": {"action": "generate"},
        "DONE": {"final": True},
    },
    "transitions": [
        {"trigger": "ready", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": "answered", "source": "GENERATING", "dest": "DONE", "conditions": "last.text.contains('good')"},
        {"trigger": "answered", "source": "GENERATING", "dest": "DONE", "conditions": "last.finish == 'length'"},
        {"trigger": "answered", "source": "GENERATING", "dest": "DONE"},
        {"trigger": ["tool_calls", "malformed", "truncated", "aborted"], "source": "GENERATING", "dest": "GENERATING"},
        {"trigger": ["limit", "failed", "results"], "source": "*", "dest": "DONE"},
    ],
}


def scenario(name: str, *replies: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "replies": list(replies), "expect": {"messages": ["..."]}, **more}


def test_transitions_to_the_same_state_are_told_apart_by_their_conditions(write: Write, run: Run) -> None:
    file = {"scenarios": [scenario("good", "a good one"), scenario("other", "a bad one"), scenario("again", "bad")]}
    coverage = run(write(file, machine=BOTH, user=None, tools=None)).coverage
    assert coverage is not None
    answered = [(edge[3], count) for edge, count in coverage.taken.items() if edge[1] == "answered"]
    assert answered == [("last.text.contains('good')", 1), ("last.finish == 'length'", 0), (None, 2)]


def test_what_no_action_says_and_no_limit_ends_cannot_be_missed(write: Write, run: Run) -> None:
    limits = {"episode_seconds": None}
    coverage = run(
        write({"scenarios": [scenario("one", "good")]}, machine=BOTH, user=None, tools=None, limits=limits)
    ).coverage
    assert coverage is not None
    assert [show_edge(edge) for edge in coverage.impossible] == [
        "PENDING --limit--> DONE",  # nothing limits a reset but the time of the whole episode
        "PENDING --results--> DONE",
        "GENERATING --results--> DONE",
    ]
    assert [show_edge(edge) for edge in coverage.missing] == [
        "GENERATING --answered--> DONE  [last.finish == 'length']",
        "GENERATING --answered--> DONE",
        "GENERATING --tool_calls--> GENERATING",
        "GENERATING --malformed--> GENERATING",
        "GENERATING --truncated--> GENERATING",
        "GENERATING --aborted--> GENERATING",
        "PENDING --failed--> DONE",
        "GENERATING --limit--> DONE",
        "GENERATING --failed--> DONE",
    ]
    assert coverage.percent == 100 * 2 / 11


def test_a_guard_that_cannot_be_told_takes_the_way_of_failures(write: Write, run: Run) -> None:
    machine = BOTH | {
        "transitions": [
            {"trigger": "answered", "source": "GENERATING", "dest": "DONE", "conditions": "task.nothing > 1"},
            *BOTH["transitions"],  # type: ignore[misc]
        ]
    }
    file = {"scenarios": [scenario("one", "good", expect={"outcome": {"failure": {"kind": "guard_error"}}})]}
    suite = run(write(file, machine=machine, user=None, tools=None))
    assert [result.passed for result in suite.results] == [True]
    assert suite.coverage is not None
    assert [show_edge(edge) for edge, count in suite.coverage.taken.items() if count] == [
        "PENDING --ready--> GENERATING",
        "GENERATING --failed--> DONE",
    ]


def test_without_scenarios_everything_is_missing(write: Write, run: Run) -> None:
    suite = run(write())
    assert (suite.scenarios, suite.results, suite.invalid) == (None, [], False)
    assert suite.coverage is not None
    assert suite.coverage.percent == 0.0
    assert len(suite.coverage.missing) == len(suite.coverage.taken) == 18
