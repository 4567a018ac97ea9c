"""The episodes of a run -> counters of those that run, and a summary of those that are finished.

`RunCounters` counts running episodes; `RunSummary` adds up finished trajectories and needs nothing else, so
a stored run can be summarised again at any time.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.actions.facts import ACTIONS
from engine.episode.episode import Episode
from engine.runner.failure_causes import BACKEND_SHARE, Cause, Causes
from engine.schemas.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from engine.backends.http.outage import Outage
    from engine.errors import EngineError

_GENERATE = frozenset(ACTIONS["generate"].events or ())


def label(outcome: Outcome) -> str:
    """Return how an episode ended, in one or two words."""
    if outcome.failure is not None:
        return f"failed: {outcome.failure.kind} ({outcome.failure.blame})"
    if outcome.limit is not None:
        return f"limit: {outcome.limit}"
    if outcome.solved:
        return "solved"
    return outcome.event


_BRANCH_REASONS = ("edited", "repeated", "sibling", "tools_changed", "condensed", "subagent")
"""Reasons of branches that are one word. Others are sentences about the chat template."""


def branch_reasons(trajectory: Trajectory) -> dict[str, int]:
    """Count why the rows of an episode after its first began. Reasons in words are `condensed`, or `template`: what it rewrites."""
    words = (branch.reason.partition(":")[0] for branch in trajectory.branches[1:])
    return dict(Counter(word if word in _BRANCH_REASONS else "template" for word in words))


@dataclass(slots=True)
class RunCounters:
    """Counters of a running run."""

    total: int
    """Planned number of episodes."""
    before: int = 0
    """Number of episodes that were finished before this launch."""
    states: Counter[str] = field(default_factory=Counter)
    """Number of episodes in each state now."""
    tokens: int = 0
    """Tokens sampled since the run (or its resume) began."""
    turns: int = 0
    """Assistant turns since then, of finished and of running episodes."""
    finished: int = 0
    """Episodes finished since then."""
    finished_turns: int = 0
    """Assistant turns of these."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of these that failed, by kind and blame."""
    limits: Counter[str] = field(default_factory=Counter)
    """Number of these that a limit ended, by limit."""
    began: float = field(default_factory=time.perf_counter)
    outages: list[Outage] = field(default_factory=list)
    """The outages of the run's backends."""

    @property
    def waits(self) -> str | None:
        """Describe the server that the run waits for; None if it waits for none."""
        return "; ".join(filter(None, (outage.told() for outage in self.outages))) or None

    def enter(self, state: str) -> None:
        """Count an episode that begins in `state`."""
        self.states[state] += 1

    def watch(self, episode: Episode, source: str, event: str) -> None:
        """Count a transition of an episode, which is in its new state already."""
        self.states[source] -= 1
        self.states[episode.state] += 1
        if event in _GENERATE:
            self.turns += 1
            self.tokens += episode.reply.tokens

    def leave(self, state: str) -> None:
        """Remove an episode that is done or was given up."""
        self.states[state] -= 1

    def end(self, trajectory: Trajectory) -> None:
        """Count an episode that is finished."""
        outcome = trajectory.outcome
        self.finished += 1
        self.finished_turns += len(trajectory.turns)
        if outcome.failure is not None:
            self.failures[f"{outcome.failure.kind} ({outcome.failure.blame})"] += 1
        elif outcome.limit is not None:
            self.limits[outcome.limit] += 1

    @property
    def seconds(self) -> float:
        """Return the wall time so far."""
        return max(time.perf_counter() - self.began, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Return the sampled tokens per second of wall time so far."""
        return self.tokens / self.seconds

    @property
    def turns_per_second(self) -> float:
        """Return the assistant turns per second of wall time so far."""
        return self.turns / self.seconds

    @property
    def eta(self) -> float | None:
        """Estimate the seconds until all episodes are finished; None before the first one is finished, and after the last.

        The remaining turns are those of episodes of mean length, without the turns that running episodes have made; each
        running episode has at least half a turn left. They take as long per turn as those so far.
        """
        left = self.total - self.before - self.finished
        if left <= 0 or not self.finished:
            return None
        if not self.finished_turns or not self.turns:
            return left * self.seconds / self.finished
        running = max(0, sum(self.states.values()))
        made = max(0, self.turns - self.finished_turns)
        turns = max(left * self.finished_turns / self.finished - made, running / 2)
        return turns / self.turns_per_second


_SUMS = (
    "episodes", "trainable", "solved", "reward", "queue_seconds", "prompt_tokens", "cached_tokens", "reply_tokens", "cost",
    "unchecked_prompts", "branches",
)  # fmt: skip
_COUNTERS = ("outcomes", "transitions", "counts", "branch_reasons")
_BY_NAME = ("names", "seconds")


@dataclass(slots=True)
class SourceSums:
    """Sums over the finished episodes of one source of a mix."""

    episodes: int = 0
    solved: int = 0
    reward: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one finished episode."""
        self.episodes += 1
        self.solved += outcome.solved
        self.reward += outcome.reward


@dataclass(slots=True)
class RunSummary:
    """Sums over finished episodes."""

    episodes: int = 0
    trainable: int = 0
    solved: int = 0
    reward: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Causes = field(default_factory=Causes)
    """Failures by cause."""
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    turn_rewards: list[list[float]] = field(default_factory=list)
    """For each turn: the sum of its rewards, and the number of episodes that reached it."""
    names: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Wall time by state, summed over episodes."""
    queue_seconds: float = 0.0
    """The part of it that generations waited inside the backend."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    """Tokens of replies that came as text."""
    cost: float = 0.0
    """Price of the turns. `costs.jsonl` has that of every reply, also of users, judges and unfinished episodes."""
    unchecked_prompts: int = 0
    """Turns whose prompt the server did not report."""
    branches: int = 0
    branch_reasons: Counter[str] = field(default_factory=Counter)
    """How many of them began for which reason; without the first row of each episode."""
    mix: Collection[str] = ()
    """Names of the sources of `tasks.mix`."""
    sources: dict[str, SourceSums] = field(default_factory=dict)
    """Sums by source, in the order of `mix`."""

    def __post_init__(self) -> None:
        self.sources |= {name: SourceSums() for name in self.mix}

    def add(self, trajectory: Trajectory) -> Cause | None:
        """Count one finished episode, and return the cause if it failed."""
        outcome = trajectory.outcome
        self.episodes += 1
        self.trainable += outcome.trainable
        self.solved += outcome.solved
        self.reward += outcome.reward
        self.outcomes[label(outcome)] += 1
        if self.mix:
            self.sources[trajectory.task_id.partition(":")[0]].add(outcome)
        transitions = self.transitions
        for taken in trajectory.path:
            transitions[taken] += 1
        self.branches += len(trajectory.branches)
        if len(trajectory.branches) > 1:
            self.branch_reasons.update(branch_reasons(trajectory))
        for turn in trajectory.turns:
            if turn.index == len(self.turn_rewards):
                self.turn_rewards.append([0.0, 0.0])
            row = self.turn_rewards[turn.index]
            if turn.rewards:
                row[0] += sum(turn.rewards.values())
            row[1] += 1
            self.queue_seconds += turn.queue_seconds
            self.prompt_tokens += turn.prompt_tokens
            self.cached_tokens += turn.cached_tokens
            self.reply_tokens += turn.reply_tokens
            self.cost += turn.cost
            self.unchecked_prompts += turn.prompt_unchecked
        for name, value in outcome.rewards.items():
            self.names[name] += value
        self.counts.update(trajectory.counts)
        for state, seconds in trajectory.seconds.items():
            self.seconds[state] += seconds
        return self.causes.add(trajectory)

    def merge(self, other: RunSummary) -> None:
        """Add the sums of other episodes of the same spec."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for counted in _COUNTERS:
            getattr(self, counted).update(getattr(other, counted))
        for added in _BY_NAME:
            own = getattr(self, added)
            for name, value in getattr(other, added).items():
                own[name] += value
        for index, (total, reached) in enumerate(other.turn_rewards):
            if index == len(self.turn_rewards):
                self.turn_rewards.append([0.0, 0.0])
            self.turn_rewards[index][0] += total
            self.turn_rewards[index][1] += reached
        for name, sums in other.sources.items():
            mine = self.sources.setdefault(name, SourceSums())
            mine.episodes += sums.episodes
            mine.solved += sums.solved
            mine.reward += sums.reward
        self.causes.merge(other.causes)

    @property
    def backend_failed(self) -> bool:
        """Whether the backend failed more than a tenth of the episodes."""
        return self.causes.blamed("backend") > BACKEND_SHARE * self.episodes

    @property
    def all_failed(self) -> bool:
        """Whether there are episodes, and each of them failed."""
        return 0 < self.episodes == self.causes.failures

    @property
    def mean_reward(self) -> float:
        """Mean over episodes of the sum of an episode's rewards; 0 before the first."""
        return self.reward / self.episodes if self.episodes else 0.0


@dataclass(slots=True)
class RunResult:
    """The outcome of a run."""

    summary: RunSummary
    interrupted: bool = False
    """Whether the run was cancelled, so that some episodes are not done."""
    faults: list[str] = field(default_factory=list)
    """Episodes that could not be finished because of an error in the engine."""
    stopped: EngineError | None = None
    """Why the run stopped by itself: no server for too long, or all first episodes failed with one cause."""
