"""Finished trajectories -> the sums over the episodes of a run, and how it ended; a stored run can be summarised again
at any time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.runner.failure_causes import BACKEND_SHARE, Cause, Causes
from engine.schemas.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from engine.errors import EngineError


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
    """Count why the rows of an episode after its first began. Reasons in words are `condensed`, or `template`: what it
    rewrites."""
    words = (branch.reason.partition(":")[0] for branch in trajectory.branches[1:])
    return dict(Counter(word if word in _BRANCH_REASONS else "template" for word in words))


_SUMS = (
    "episodes", "trainable", "solved", "reward", "queue_seconds", "prompt_tokens", "cached_tokens", "reply_tokens",
    "cost",
    "unchecked_prompts", "branches",
)  # fmt: skip

_COUNTERS = ("outcomes", "transitions", "counts", "branch_reasons")

_BY_NAME = ("names", "seconds")


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
    sources: dict[str, RunSummary] = field(default_factory=dict)
    """Sums by source, in the order of `mix`."""

    def __post_init__(self) -> None:
        self.sources |= {name: RunSummary() for name in self.mix}

    @property
    def unchecked_words(self) -> str:
        """What is not known about prompts that a server did not report; empty if there are none."""
        return (
            f"prompts unchecked: {self.unchecked_prompts:,}. The server did not report them, so nothing shows that it "
            "computed on the ids of the rows"
            if self.unchecked_prompts
            else ""
        )

    def add(self, trajectory: Trajectory) -> Cause | None:
        """Count one finished episode, and return the cause if it failed."""
        outcome = trajectory.outcome
        self.episodes += 1
        self.trainable += outcome.trainable
        self.solved += outcome.solved
        self.reward += outcome.reward
        self.outcomes[label(outcome)] += 1
        if self.mix:
            self.sources[trajectory.task_id.partition(":")[0]].add(trajectory)
        self.transitions.update(trajectory.path)
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
            totals = getattr(self, added)
            for name, value in getattr(other, added).items():
                totals[name] += value
        for index, (total, reached) in enumerate(other.turn_rewards):
            if index == len(self.turn_rewards):
                self.turn_rewards.append([0.0, 0.0])
            self.turn_rewards[index][0] += total
            self.turn_rewards[index][1] += reached
        for name, sums in other.sources.items():
            self.sources.setdefault(name, RunSummary()).merge(sums)
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
    seconds: float = 0.0
    """Wall time of this launch's episodes."""
    tokens: int = 0
    """Number of tokens that were sampled in this launch."""
    notes: list[str] = field(default_factory=list)
    """What else is to be said of the launch: costs, calls that did not end, comparisons with the servers."""
