"""The episodes that run now -> how many are in which state, their turns and tokens, and the time that is left."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.actions.facts import ACTIONS
from engine.episode.episode import Episode
from engine.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from engine.backends.outage import Outage

_GENERATE = frozenset(ACTIONS["generate"].events or ())


@dataclass(slots=True)
class RunCounters:
    """Counters of a running run."""

    total: int
    """Planned number of episodes."""
    before: int = 0
    """Number of episodes that were finished before this launch."""
    states: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of episodes in each state now."""
    tokens: int = 0
    """Tokens sampled since the run (or its resume) began."""
    turns: int = 0
    """Assistant turns since then, of finished and of running episodes."""
    finished: int = 0
    """Episodes finished since then."""
    finished_turns: int = 0
    """Assistant turns of these."""
    finished_seconds: float = 0.0
    """Sum of the times that these took."""
    cut: int = 0
    """Replies of these that a limit of tokens cut."""
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

    def watch(self, episode: Episode, source: str, event: str) -> None:
        """Count a transition of an episode, which is in its new state already."""
        self.states[source] -= 1
        self.states[episode.state] += 1
        if event in _GENERATE:
            self.turns += 1
            self.tokens += episode.reply.tokens

    def end(self, trajectory: Trajectory) -> None:
        """Count an episode that is finished."""
        outcome = trajectory.outcome
        self.finished += 1
        self.finished_turns += len(trajectory.turns)
        self.finished_seconds += sum(trajectory.seconds.values())
        self.cut += [turn.event for turn in trajectory.turns].count("truncated")
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
        """Estimate the seconds until all episodes are finished; None while less than an eighth of those that began are,
        and after the last.

        An episode that has not begun takes as many turns as the finished ones, on average. These are the short ones
        while many run: a running episode has at least half of all turns per finished episode left. At the end few turns
        run side by side, so the time is at least half of that of a turn.
        """
        left = self.total - self.before - self.finished
        running = min(left, max(0, sum(self.states.values())))
        if left <= 0 or 8 * self.finished < max(running, 1):
            return None
        if not self.finished_turns or not self.turns:
            return left * self.seconds / self.finished
        mean = self.finished_turns / self.finished
        made = self.turns - self.finished_turns
        turns = (left - running) * mean + max(running * mean - made, running * self.turns / self.finished / 2)
        return max(turns / self.turns_per_second, self.finished_seconds / self.finished_turns / 2)
