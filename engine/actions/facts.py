"""What is known of each action before any episode runs: its events, its count limit, its deadline and its class.

The action classes, the static checks, the worst case, scenario coverage, the JSON Schema and docs/spec.md read these tables and
repeat nothing of them. The tables are here and not on the classes because `engine validate` reads them, and importing the
classes (backends, worker processes) would double its start-up time.

To add an action: its file in this folder and its entry in `ACTIONS`. To add a limit on a count: its field in
`LimitsSpec` and its entry in `COUNT_LIMITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from engine.schemas.backend import LocalBackendSpec, ScriptedBackendSpec

if TYPE_CHECKING:
    from engine.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.machine import StateSpec

Seconds = Callable[["EpisodeSpec", "StateSpec"], float]
"""The most seconds that one visit of a state may take; infinite where nothing bounds it."""

ALWAYS: tuple[str, ...] = ("limit", "failed")
"""Events that every state which is not final may meet: a limit was reached before its action began, or the action failed."""

MOST_STEPS = 100_000
"""Most steps of an episode: the executor stops a machine whose cycles no limit bounds."""

OWN_ACTION_SECONDS = 60.0
"""Deadline of an action of the spec's own whose state gives none."""

SCORERS = {"math-verify": "engine.environments.scorers:math_verify"}
"""Scorers that have a short name, and their entry points."""


@dataclass(frozen=True, slots=True)
class CountLimit:
    """A limit on how often something happens in one episode."""

    name: str
    """Its field of `LimitsSpec`."""
    action: str
    """The action that it stops, and whose steps are counted."""
    variable: str
    """The guard variable that holds the count."""
    budget: str
    """Its name in `engine validate --budget`."""
    count: Callable[[Episode], int]
    """The count so far."""

    def most(self, limits: LimitsSpec) -> int | None:
        """The limit that a spec sets; None where it sets none."""
        most: int | None = getattr(limits, self.name)
        return most

    def reached(self, limits: LimitsSpec, episode: Episode) -> tuple[str, float] | None:
        """(name, count) where the limit forbids the action now."""
        most = self.most(limits)
        if most is None or (count := self.count(episode)) < most:
            return None
        return self.name, count


@dataclass(frozen=True, slots=True)
class ActionFacts:
    """One action that ships with the engine."""

    use: str
    """`module:class` of its implementation."""
    does: str
    """What it does, in one sentence, for the docs."""
    events: tuple[str, ...] | None
    """Events that it may end with, other than `ALWAYS`; None: the spec's environment declares them."""
    seconds: Seconds
    needs_context: bool = False
    """The conversation must fit the model's context, so a limit may stop it whatever `limits` says."""


def _environment(spec: EpisodeSpec, state: StateSpec) -> float:
    return spec.environment.timeout if spec.environment else 0.0


def _generation(spec: EpisodeSpec, state: StateSpec) -> float:
    backend = spec.backend
    if isinstance(backend, ScriptedBackendSpec):
        return backend.latency
    if isinstance(backend, LocalBackendSpec):
        return inf
    return backend.timeout * (backend.retries + 1)


def _tools(spec: EpisodeSpec, state: StateSpec) -> float:
    seconds = [tool.timeout or spec.limits.tool_seconds for tool in spec.tools]
    return max([*seconds, *([spec.limits.tool_seconds] if spec.environment else [])], default=0.0)


def _users(spec: EpisodeSpec, state: StateSpec) -> float:
    return max((user.seconds for user in spec.people.values()), default=0.0)


def _scoring(spec: EpisodeSpec, state: StateSpec) -> float:
    scorer = spec.rewards.scorer
    return _environment(spec, state) + (scorer.seconds if scorer is not None else 0.0)


ACTIONS: Mapping[str, ActionFacts] = {
    "reset": ActionFacts(
        "engine.actions.reset:ResetAction",
        "Begin the environment, and open the conversation.",
        ("ready",),
        _environment,
    ),
    "generate": ActionFacts(
        "engine.actions.generate:GenerateAction",
        "Sample one reply of the model.",
        ("tool_calls", "answered", "truncated", "malformed", "aborted"),
        _generation,
        needs_context=True,
    ),
    "call_tools": ActionFacts(
        "engine.actions.call_tools:CallToolsAction", "Carry out the calls of the newest reply.", ("results",), _tools
    ),
    "ask_user": ActionFacts(
        "engine.actions.ask_user:AskUserAction", "Ask the user for an answer.", ("feedback", "satisfied"), _users
    ),
    "score": ActionFacts(
        "engine.actions.score:ScoreAction", "Ask the environment and the scorer for the last rewards.", (), _scoring
    ),
    "step": ActionFacts("engine.actions.custom:EnvironmentStep", "Ask the environment for a step.", None, _environment),
}
"""Actions that a state may name, other than the spec's own (`package.module:name`)."""

COUNT_LIMITS: tuple[CountLimit, ...] = (
    CountLimit("assistant_turns", "generate", "turns.assistant", "turns", lambda episode: episode.turn + 1),
    CountLimit("user_turns", "ask_user", "turns.user", "user_turns", lambda episode: episode.user_turns),
    CountLimit("tool_calls", "call_tools", "tools.calls", "tool_calls", lambda episode: episode.tool_calls),
)
"""Each stops one action; the order is that of the counters in `engine.checks`."""

COUNT_LIMIT_OF: Mapping[str, CountLimit] = {limit.action: limit for limit in COUNT_LIMITS}
"""By the action that it stops."""


def seconds_of(spec: EpisodeSpec, state: StateSpec) -> float:
    """The most seconds that a state's action may take; infinite where it has no deadline, 0 where it has no action."""
    if state.action is None:
        return 0.0
    facts = ACTIONS.get(state.action)
    return facts.seconds(spec, state) if facts is not None else state.timeout or OWN_ACTION_SECONDS


def may_be_limited(action: str | None, limits: LimitsSpec) -> bool:
    """Whether some limit may stop an action."""
    if action is None:
        return False
    facts, counted = ACTIONS.get(action), COUNT_LIMIT_OF.get(action)
    if limits.episode_seconds is not None or (facts is not None and facts.needs_context):
        return True
    return counted is not None and counted.most(limits) is not None
