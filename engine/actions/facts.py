"""A table: the built-in actions, with their classes, events, deadlines and effects on the conversation.

The action classes, the static checks, the worst case, scenario coverage, the JSON Schema and docs/spec.md read this
table and do not repeat it. The table is here and not on the classes because `engine validate` reads it, and importing
the classes (backends, worker processes) would double its start-up time.

To add an action, add its file in this folder and its entry in `_CORE`. A plugin adds one by the point `actions` of its
face. Limits are in `engine.limits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine import plugin
from engine.actions.action_facts import NO_CALLS, OWN_ACTION_SECONDS, SURE_CALLS, ActionFacts
from engine.schemas.limits import ALWAYS, OVERFLOW

if TYPE_CHECKING:
    from engine.machine.machine import ResolvedMachine
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.machine import StateSpec

SCORERS = {"math-verify": "engine.environments.scorers:math_verify"}
"""Scorers with a short name, and their entry points."""


def _environment(spec: EpisodeSpec, state: StateSpec) -> float:
    return spec.environment.timeout if spec.environment else 0.0


def _tools(spec: EpisodeSpec, state: StateSpec) -> float:
    seconds = [tool.timeout or spec.limits.tool_seconds for tool in spec.tools]
    return max([*seconds, *([spec.limits.tool_seconds] if spec.environment else [])], default=0.0)


def _scoring(spec: EpisodeSpec, state: StateSpec) -> float:
    scorer = spec.rewards.scorer
    return _environment(spec, state) + (scorer.seconds if scorer is not None else 0.0)


_CORE: Mapping[str, ActionFacts] = {
    "reset": ActionFacts(
        use="engine.actions.spec_code:ResetAction",
        does="Begin the environment and the conversation.",
        events=("ready",),
        seconds=_environment,
    ),
    "generate": ActionFacts(
        use="engine.actions.generate:GenerateAction",
        does="Sample one reply of the model.",
        events=("tool_calls", "answered", "truncated", "malformed", "aborted"),
        seconds=lambda spec, state: spec.backend.reply_seconds,
        speaks="assistant",
        calls={"tool_calls": SURE_CALLS, "answered": NO_CALLS},
        overflows=True,
    ),
    "call_tools": ActionFacts(
        use="engine.actions.spec_code:CallToolsAction",
        does="Carry out the calls of the newest reply.",
        events=("results",),
        seconds=_tools,
        speaks="tool",
        answers_calls=True,
    ),
    "ask_user": ActionFacts(
        use="engine.actions.spec_code:AskUserAction",
        does="Ask the user for an answer.",
        events=("feedback", "satisfied"),
        seconds=lambda spec, state: max((user.seconds for user in spec.users_by_name.values()), default=0.0),
        speaks="user",
    ),
    "score": ActionFacts(
        use="engine.actions.spec_code:ScoreAction",
        does="Ask the environment and the scorer for the last rewards.",
        events=(),
        seconds=_scoring,
    ),
    "step": ActionFacts(
        use="engine.actions.spec_code:StepAction",
        does="Ask the environment for a step.",
        events=None,
        seconds=_environment,
    ),
}
ACTIONS: Mapping[str, ActionFacts] = {**_CORE, **plugin.loaded("actions", _CORE)}
"""Actions that a state may name besides custom ones (`package.module:name`)."""


def events_of(machine: ResolvedMachine) -> dict[str, frozenset[str]]:
    """Return the events that may occur in each state with a built-in action, by state."""
    return {
        name: frozenset((*facts.events, *ALWAYS, *([OVERFLOW] if facts.overflows else [])))
        for name, state in machine.states.items()
        if (facts := ACTIONS.get(str(state.action))) is not None and facts.events is not None
    }


def owns_conversation(machine: ResolvedMachine) -> bool:
    """Whether an action of the machine brings the conversation, so that `reset` opens none."""
    rows = (ACTIONS.get(str(state.action)) for state in machine.states.values())
    return any(facts is not None and facts.owns_conversation for facts in rows)


def seconds_of(spec: EpisodeSpec, state: StateSpec) -> float:
    """Maximum seconds of a state's action; infinite if it has no deadline, 0 if the state has no action."""
    if state.action is None:
        return 0.0
    facts = ACTIONS.get(state.action)
    return facts.seconds(spec, state) if facts is not None else state.timeout or OWN_ACTION_SECONDS
