"""The difficulty filter: tasks that the policy always or never solves are drawn less often (`train.difficulty`).

The solve rate of a task is that of its newest `window` episodes, over all epochs. Results count when their step is
made. Whether a draw is skipped depends on these results, the draw's number and `train.seed` alone.

Invariants:
- A resumed training has the results of the batch log, and so skips the same draws after the same steps.
- A draw is made after at most as many skipped ones as there are tasks, and at most `MAX_SKIPPED`: there is always a
  next task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import structlog

from engine.plugins.difficulty.spec import DifficultySpec
from engine.runner.task_order import DrawFilter

if TYPE_CHECKING:
    from engine.runner.batch import Group
    from engine.runner.task_order import TaskOrder
    from engine.schemas.train import TrainSpec

log = structlog.get_logger(__name__)

MAX_SKIPPED = 4096
"""Most draws that are skipped one after the other."""

Result = tuple[int, int]
"""Number of solved episodes of a group, and of all of its episodes."""


class DifficultyFilter(DrawFilter):
    """Solve rates of tasks, and the draws that they skip.

    Args:
        spec: Window, bounds and part that is kept.
        order: The task of each draw.
        seed: `train.seed`.
    """

    def __init__(self, spec: DifficultySpec, order: TaskOrder, seed: int) -> None:
        self._spec = spec
        self._order = order
        self._seed = seed
        self._results: dict[int, deque[Result]] = {}
        """The newest groups of each task, by its index."""
        self.most_skipped = min(order.count, MAX_SKIPPED)

    def results(self, groups: Sequence[Group]) -> dict[str, list[int]]:
        """See `DrawFilter`: solved and all episodes of each group."""
        at, results = self._spec.solved_at, {}
        for group in groups:
            outcomes = [trajectory.outcome for trajectory in group.trajectories if trajectory.outcome.trainable]
            solved = sum(outcome.solved if at is None else outcome.reward >= at for outcome in outcomes)
            results[str(group.number)] = [solved, len(outcomes)]
        return results

    def add(self, results: Mapping[str, Sequence[int]]) -> None:
        """See `DrawFilter`."""
        for number in sorted(results, key=int):
            solved, episodes = results[number]
            index, _ = self._order.place(int(number))
            mine = self._results.setdefault(index, deque())
            mine.append((solved, episodes))
            while sum(count for _, count in mine) - mine[0][1] >= self._spec.window:
                mine.popleft()

    def rate(self, index: int) -> float | None:
        """The solve rate of a task, by its index; None if fewer than `window` episodes are known."""
        mine = self._results.get(index, ())
        episodes = sum(count for _, count in mine)
        return sum(solved for solved, _ in mine) / episodes if episodes >= self._spec.window else None

    def skips(self, number: int) -> bool:
        """See `DrawFilter`."""
        rate = self.rate(self._order.place(number)[0])
        if rate is None or self._spec.low < rate < self._spec.high:
            return False
        digest = blake2b(f"difficulty/{self._seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 >= self._spec.keep

    def metrics(self, step: int, skipped: int, forced: int) -> dict[str, float]:
        """See `DrawFilter`."""
        if forced:
            log.warning(
                "tasks were drawn although they are always or never solved, because the filter skipped all others",
                step=step,
                groups=forced,
            )
        rates = [rate for index in self._results if (rate := self.rate(index)) is not None]
        return {
            "difficulty/skipped": float(skipped),
            "difficulty/forced": float(forced),
            "difficulty/easy": float(sum(rate >= self._spec.high for rate in rates)),
            "difficulty/hard": float(sum(rate <= self._spec.low for rate in rates)),
            "difficulty/measured": float(len(rates)),
        }


def draw_filter(train: TrainSpec, order: TaskOrder) -> DifficultyFilter | None:
    """The hook `filter_draws`."""
    section = DifficultySpec.section_of(train)
    return None if section is None else DifficultyFilter(section, order, train.seed)
