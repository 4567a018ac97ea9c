"""Two runs, paired by task: what got better and worse, and how their specs differ.

found = compare_runs(first, second)     # open stores
found.tasks[0]                          # the task with the largest loss
found.spec                              # [SpecDifference(path="sampling.temperature", first=1.0, second=0.7)]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np

from engine.plugins.evaluation.intervals import proportion_interval
from engine.plugins.evaluation.measures import (
    Estimate,
    MeasureDifference,
    Sample,
    by_task,
    collect,
    differences,
    few_tasks,
)
from engine.plugins.show.listing.heads import heads
from engine.schemas.base import Struct
from engine.store import header
from engine.store.reader import RunReader


class Side(Struct, frozen=True, kw_only=True):
    """The measured episodes of one task in one run. Failures that are not the policy's are not measured."""

    episodes: int
    solved: float
    """Part of them that were solved."""
    reward: float
    """Mean of the sums of rewards."""
    turns: float
    tokens: float


class TaskPair(Struct, frozen=True, kw_only=True):
    """One task in both runs."""

    task: str
    first: Side
    second: Side
    difference: float
    """Mean reward in the second run minus that in the first."""
    verdict: str
    """`better`, `worse` or `same`: by the mean reward, and by the part of solved episodes if the rewards are equal."""


class SpecDifference(Struct, frozen=True, kw_only=True):
    """A value that differs between the specs, the engines or the packages of two runs."""

    path: str
    """Its path in the spec, `engine_version`, or `packages.<name>`."""
    first: Any
    """None where the run does not have it."""
    second: Any


class RunComparison(Struct, frozen=True, kw_only=True):
    """Two runs, compared task by task."""

    first: str
    """The run's id."""
    second: str
    measures: list[MeasureDifference]
    tasks: list[TaskPair]
    """The largest loss first, the largest gain last."""
    only_first: int
    """Number of tasks that only the first run has measured."""
    only_second: int
    changed: list[str]
    """Tasks with the same id and other fields, which are not compared."""
    masked: list[int]
    """Episodes of each run that are not measured, because the policy did not cause their failure."""
    warning: str | None
    """Set if there are too few tasks for reliable intervals."""
    spec: list[SpecDifference]
    nothing: str | None = None
    """Why no task could be compared, and what to do; None if some were."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of tasks by verdict."""
        return {verdict: sum(pair.verdict == verdict for pair in self.tasks) for verdict in ("better", "worse", "same")}


def compare_runs(first: RunReader, second: RunReader) -> RunComparison:
    """Compare the second run with the first.

    Raises:
        StoreError: an episode is damaged.
    """
    (ones, masked_one), (others, masked_other) = collect(heads(first)), collect(heads(second))
    left, right = by_task(ones), by_task(others)
    both = [task for task in left if task in right]
    changed = [task for task in both if first.task(task).fields != second.task(task).fields]
    tasks = [task for task in both if task not in changed]
    pairs = [_pair(task, left[task], right[task]) for task in tasks]
    one, other = first.header, second.header  # values of variables are compared by their names: none is stored
    before, after = ({"engine_version": each.engine_version, "packages": each.packages} for each in (one, other))
    places = [*header.differences(one.spec, other.spec), *header.differences(before, after)]
    return RunComparison(
        first=first.run_id,
        second=second.run_id,
        measures=differences(left, right, tasks),
        tasks=sorted(pairs, key=lambda pair: (pair.difference, pair.second.solved - pair.first.solved)),
        only_first=len(left) - len(both),
        only_second=len(right) - len(both),
        changed=changed,
        masked=[masked_one.total(), masked_other.total()],
        warning="1 task: a difference has no interval" if len(tasks) == 1 else few_tasks(len(tasks)),
        spec=[SpecDifference(path=path, first=was, second=now) for path, was, now in places],
        nothing=None if tasks else _nothing((left, right), (masked_one.total(), masked_other.total()), changed),
    )


def _nothing(measured: Sequence[Collection[str]], masked: Sequence[int], changed: Sequence[str]) -> str:
    """Say why two runs have no task to compare, given the measured tasks of each."""
    for which, tasks, failed in zip(("first", "second"), measured, masked, strict=True):
        if not tasks:
            return (
                f"all {failed} finished episodes of the {which} run have a failure that is not the policy's, and these "
                "are not measured; mend the cause, and run it again"
                if failed
                else f"the {which} run has no finished episode yet; wait until one has ended"
            )
    first, second = (next(iter(tasks)) for tasks in measured)
    if not changed:
        return (
            f"the runs have no task in common: the first has tasks like `{first}`, the second like `{second}`; compare "
            "runs of the same tasks"
        )
    return (
        f"all tasks of the same id have other fields in the second run, such as `{changed[0]}`; compare runs of the "
        "same tasks, or give a task that changed another id"
    )


def _pair(task: str, first: Sequence[Sample], second: Sequence[Sample]) -> TaskPair:
    one, other = _side(first), _side(second)
    gains = (other.reward - one.reward, other.solved - one.solved)
    gain = next((each for each in gains if abs(each) > 1e-9), 0.0)
    return TaskPair(
        task=task,
        first=one,
        second=other,
        difference=gains[0],
        verdict="same" if not gain else "better" if gain > 0 else "worse",
    )


def _side(samples: Sequence[Sample]) -> Side:
    count = len(samples)
    return Side(
        episodes=count,
        solved=sum(sample.solved_turn is not None for sample in samples) / count,
        reward=math.fsum(sample.reward for sample in samples) / count,
        turns=sum(sample.turns for sample in samples) / count,
        tokens=sum(sample.tokens for sample in samples) / count,
    )


_MEASURED = "status = 'done' AND (failure IS NULL OR blame = 'policy')"
_TASKS = f"SELECT avg(solved), count(*) FROM episodes WHERE {_MEASURED} GROUP BY task_index, task_id"


def success_of(store: RunReader) -> dict[str, Any]:
    """Return the success of a run's policy as `Estimate` gives it, and the number of episodes that are measured, by SQL
    over their summaries. Those with a failure that the policy did not cause are left out."""
    with store.snapshot() as connection:
        pairs = np.fromiter(chain.from_iterable(connection.execute(_TASKS)), np.float64).reshape(-1, 2)
    means, episodes = pairs[:, 0], int(pairs[:, 1].sum())
    low, high = proportion_interval(means, episodes)
    return Estimate(
        value=float(means.mean()) if len(means) else float("nan"), low=low, high=high, tasks=len(means)
    ).plain() | {"episodes": episodes}
