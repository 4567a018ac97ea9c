"""Scenarios of failures and of the time limit, made of those that a spec's author wrote.

Invariant: one is made only for a transition that no written scenario takes, of the written scenario that comes first to
its state; it scripts one more answer, and nothing of what happens before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.plugins.scenarios.schema import (
    EnvironmentScript,
    Expectation,
    ExpectedFailure,
    ExpectedOutcome,
    OutOfTime,
    ScriptedReset,
    ScriptedResult,
    ScriptedScore,
    ScriptedStep,
    ScriptedUserTurn,
)
from engine.schemas.limits import FAILED, LIMIT
from engine.schemas.script import ScriptedReply

if TYPE_CHECKING:
    from engine.machine.machine import ResolvedMachine
    from engine.plugins.scenarios.coverage import Edge
    from engine.plugins.scenarios.play import Played
    from engine.plugins.scenarios.schema import Scenario

ABORTED = "aborted"
_SAYS = {LIMIT: "the time is up in", FAILED: "a failure in", ABORTED: "a reply is given up in"}
_WHY = "the scenario says so"


@dataclass(frozen=True)
class _Visit:
    """A visit of a written scenario to a state."""

    scenario: Scenario
    played: Played
    machine: ResolvedMachine
    index: int
    """Of the state, among those of the episode."""

    @property
    def state(self) -> str:
        return self.played.states[self.index]

    @property
    def action(self) -> str:
        return self.machine.states[self.state].action or ""

    def before(self, action: str) -> int:
        """Number of earlier visits to states with an action."""
        earlier = self.played.states[: self.index]
        return sum(self.machine.states[state].action == action for state in earlier)

    def called(self) -> str | None:
        """The tool that the model called last before this visit."""
        turns = self.before("generate")
        said = self.played.trajectory.messages[self.played.prompt :]
        replies = [message for message in said if message.role == "assistant"][:turns]
        return replies[-1].tool_calls[0].name if replies and replies[-1].tool_calls else None


def failing(
    edges: Iterable[Edge], written: Iterable[tuple[Scenario, Played]], machine: ResolvedMachine, *, timed: bool
) -> Iterator[tuple[Edge, Scenario]]:
    """Yield a scenario for each transition by a failure, a time limit or a reply that is given up.

    Args:
        edges: Transitions that no written scenario takes.
        written: The written scenarios that were played, with their results.
        machine: The machine of the spec.
        timed: Whether the spec has a limit of time.
    """
    visits = [
        _Visit(scenario, played, machine, index)
        for scenario, played in written
        for index in range(len(played.states))
        if played.states[index] in machine.states
    ]
    visits.sort(key=lambda visit: visit.index)
    for edge in dict.fromkeys((source, trigger) for source, trigger, _, _ in edges if trigger in _SAYS):
        source, trigger = edge
        if trigger == LIMIT and not timed:
            continue
        for visit in visits:
            if visit.state == source and (changes := _changes(visit, trigger)) is not None:
                name = f"generated: {_SAYS[trigger]} {source}"
                expect = Expectation(outcome=_outcome(source, trigger))
                changed = visit.scenario.model_copy(update={"name": name, "expect": expect, **changes})
                yield next(item for item in edges if item[:2] == edge), changed
                break


def _outcome(state: str, trigger: str) -> ExpectedOutcome:
    if trigger == LIMIT:
        return ExpectedOutcome(limit="episode_seconds")
    if trigger == ABORTED:
        return ExpectedOutcome(trainable=False)
    return ExpectedOutcome(failure=ExpectedFailure(state=state), trainable=False)


def _changes(visit: _Visit, trigger: str) -> dict[str, Any] | None:
    """What is scripted at a visit; None where nothing can be."""
    scenario, action = visit.scenario, visit.action
    if trigger == LIMIT:
        earlier = visit.played.states[: visit.index].count(visit.state)
        return {"out_of_time": OutOfTime(state=visit.state, visit=earlier + 1)}
    if action == "generate":
        turn = visit.before(action)
        last = ScriptedReply(finish="abort") if trigger == ABORTED else ScriptedReply(error=_WHY)
        return {"replies": [*scenario.replies[:turn], last]} if turn <= len(scenario.replies) else None
    if trigger != FAILED:
        return None
    if action == "call_tools":
        tool = visit.called()
        return {"tools": [ScriptedResult(tool=tool, invalid=True), *scenario.tools]} if tool else None
    if action == "ask_user":
        count = visit.before(action)
        turns = [*scenario.user[:count], *[None] * (count - len(scenario.user))]
        return {"user": [*turns, ScriptedUserTurn(error=_WHY)]}
    if action == "reset":
        return {"environment": EnvironmentScript(reset=ScriptedReset(error=_WHY), score=scenario.environment.score)}
    if action == "score":
        return {"environment": EnvironmentScript(reset=scenario.environment.reset, score=ScriptedScore(error=_WHY))}
    if action == "step" or ":" in action:
        answers = scenario.steps.get(visit.state, [])
        count = visit.played.states[: visit.index].count(visit.state)
        steps = [*answers[:count], *[None] * (count - len(answers)), ScriptedStep(error=_WHY)]
        return {"steps": {**scenario.steps, visit.state: steps}}
    return None
