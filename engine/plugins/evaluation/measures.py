"""Statistics of an evaluation: success by turn, pass@k, rewards by name, each with a 95 % interval.

Pure functions of finished episodes. Episodes whose failure was not caused by the policy are left out and counted.

Invariant: a value is the mean over tasks of each task's mean over its episodes (`_Measure.task_means`), in `evaluate`
and in `differences`, so both give the same value for the same run. A mean over all episodes would weight a task by the
number of its episodes that are not left out, and could not be paired with another run. Intervals are over tasks: see
`intervals.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import asdict

from engine.plugins.evaluation.intervals import (
    FEW_TASKS,
    Floats,
    mean_interval,
    proportion_interval,
    share_difference_interval,
)
from engine.plugins.evaluation.spec import powers
from engine.runner.summary import label
from engine.schemas.base import Struct
from engine.schemas.trajectory import Trajectory


class Sample(Struct, frozen=True, kw_only=True):
    """The values of one episode that an evaluation needs."""

    task_id: str
    solved_turn: int | None
    """The assistant turn that solved it, from 0; None if it was not solved."""
    turns: int
    tokens: int
    reward: float
    rewards: Mapping[str, float]


class Estimate(Struct, frozen=True, kw_only=True):
    """A mean over tasks with its 95 % interval. The ends are NaN if no interval can be computed."""

    value: float
    low: float
    high: float
    tasks: int
    """Number of tasks that have this measure."""

    def plain(self) -> dict[str, float | int | None]:
        """Return the fields for JSON, with null in place of NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


@dataclass(slots=True)
class Evaluation:
    """Measures of a run's policy."""

    tasks: int
    episodes: int
    """Number of episodes that are measured."""
    masked: Counter[str]
    """Number of episodes that are left out, by kind of failure."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    """By name: `success`, `reward`, `turns`, `tokens`, `success@turn:<k>` (solved by turn k), `pass@<k>`,
    `reward:<name>`."""

    @property
    def warning(self) -> str | None:
        """A warning if there are too few tasks for the intervals; else None."""
        return few_tasks(self.tasks)


def collect(trajectories: Iterable[Trajectory]) -> tuple[list[Sample], Counter[str]]:
    """Collect the episodes that measure the policy, and count the others by kind of failure."""
    samples: list[Sample] = []
    masked: Counter[str] = Counter()
    for trajectory in trajectories:
        outcome = trajectory.outcome
        if outcome.failure is not None and outcome.failure.blame != "policy":
            masked[label(outcome)] += 1
            continue
        turns = len(trajectory.turns)
        by = outcome.solved_turn if outcome.solved_turn is not None else turns - 1
        samples.append(
            Sample(
                task_id=trajectory.task_id,
                solved_turn=max(by, 0) if outcome.solved else None,
                turns=turns,
                tokens=trajectory.counts.get("sampled_tokens", 0),
                reward=outcome.reward,
                rewards=outcome.rewards,
            )
        )
    return samples, masked


def pass_at_k(episodes: int, solved: int, k: int) -> float:
    """The probability that at least one of k episodes is solved: 1 - C(n - c, k) / C(n, k).

    Unbiased for episodes that are independent (Chen et al., arXiv 2107.03374, equation 1), as a product that does not
    overflow. NaN for k > n.
    """
    if not 0 <= solved <= episodes or k < 1:
        raise ValueError(f"{solved} solved of {episodes}, k {k}")
    if k > episodes:
        return math.nan
    if episodes - solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / left for left in range(episodes - solved + 1, episodes + 1))


def by_task(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Group episodes by task, in order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.task_id, []).append(sample)
    return groups


class _Measure(Struct, frozen=True, kw_only=True):
    """A measure with one value for each task."""

    name: str
    of_episode: Callable[[Sample], float] | None
    """The value of one episode, whose mean is that of a task; None for `pass@k`, which is of a whole group."""
    proportion: bool
    """Whether every episode's value is 0 or 1."""
    least: int = 1
    """Smallest number of episodes that a task needs: the k of `pass@k`."""

    def task_means(self, groups: Iterable[Sequence[Sample]]) -> Floats:
        """The value of each task, [tasks]. Their mean is the value that `evaluate` and `differences` return."""
        if (of := self.of_episode) is not None:
            return np.array([math.fsum(map(of, group)) / len(group) for group in groups], np.float64)
        solved = ((len(group), sum(sample.solved_turn is not None for sample in group)) for group in groups)
        return np.array([pass_at_k(episodes, count, self.least) for episodes, count in solved], np.float64)


def _reward(name: str, sample: Sample) -> float:
    return sample.rewards.get(name, 0.0)


def _solved_by(turn: int, sample: Sample) -> float:
    return float(sample.solved_turn is not None and sample.solved_turn <= turn)


def _measures(samples: Sequence[Sample], ks: Iterable[int]) -> list[_Measure]:
    """The measures of these episodes; rewards that are 0 or 1 in all of them are proportions."""
    last = max((sample.solved_turn for sample in samples if sample.solved_turn is not None), default=-1)
    of_episodes: dict[str, Callable[[Sample], float]] = {
        "success": lambda sample: float(sample.solved_turn is not None),
        "reward": lambda sample: sample.reward,
        **{
            f"reward:{name}": partial(_reward, name)
            for name in sorted({name for one in samples for name in one.rewards})
        },
        "turns": lambda sample: float(sample.turns),
        "tokens": lambda sample: float(sample.tokens),
        **{f"success@turn:{turn}": partial(_solved_by, turn) for turn in range(last + 1)},
    }
    measures = []
    for name, of in of_episodes.items():
        proportion = name not in ("turns", "tokens") and {of(sample) for sample in samples} <= {0.0, 1.0}
        measures.append(_Measure(name=name, of_episode=of, proportion=proportion))
    return measures + [_Measure(name=f"pass@{k}", of_episode=None, proportion=True, least=k) for k in ks]


def few_tasks(tasks: int) -> str | None:
    """A warning if the number of tasks is too small for reliable intervals; else None."""
    if tasks == 1:
        return "1 task: intervals are over its episodes and say nothing about other tasks"
    if tasks < FEW_TASKS:
        return (
            f"only {tasks} tasks: intervals are wide, and those of measures that are not 0 or 1 in each episode assume "
            f"task means that are approximately normal; use {FEW_TASKS} tasks or more"
        )
    return None


def evaluate(trajectories: Iterable[Trajectory]) -> Evaluation:
    """Compute all measures of an evaluation.

    Args:
        trajectories: Finished episodes of a run.
    """
    samples, masked = collect(trajectories)
    tasks = by_task(samples)
    evaluation = Evaluation(len(tasks), len(samples), masked)
    if not samples:
        return evaluation
    most = max(len(group) for group in tasks.values())
    for measure in _measures(samples, powers(most)):
        groups = [group for group in tasks.values() if len(group) >= measure.least]
        means = measure.task_means(groups)
        low, high = _interval(measure, groups, means)
        value = float(means.mean())
        evaluation.estimates[measure.name] = Estimate(value=value, low=low, high=high, tasks=len(groups))
    return evaluation


def _interval(measure: _Measure, groups: Sequence[Sequence[Sample]], means: Floats) -> tuple[float, float]:
    """The interval of one measure: over tasks, or over the episodes of the only task."""
    if len(groups) > 1:
        count = sum(len(group) // measure.least for group in groups)
        return proportion_interval(means, count) if measure.proportion else mean_interval(means)
    if measure.of_episode is None:
        return math.nan, math.nan
    values = np.array([measure.of_episode(sample) for sample in groups[0]], np.float64)
    return proportion_interval(values, len(values)) if measure.proportion else mean_interval(values)


class MeasureDifference(Struct, frozen=True, kw_only=True):
    """One measure of two runs over the same tasks."""

    name: str
    first: float
    second: float
    difference: float
    """Mean over tasks of the second run's task mean minus the first run's."""
    low: float | None
    """Lower end of the 95 % interval; None if there is none."""
    high: float | None


def differences(
    first: Mapping[str, Sequence[Sample]], second: Mapping[str, Sequence[Sample]], tasks: Sequence[str]
) -> list[MeasureDifference]:
    """Compare the second run with the first, paired by task, so that a task's difficulty cancels out of the difference.

    The measures and their values are those of `evaluate` over these tasks; pass@k up to the fewest episodes that a task
    has in either run.

    Args:
        first: The samples of one run, by task.
        second: Those of the other run.
        tasks: Tasks that both have.
    """
    sides = [[side[task] for task in tasks] for side in (first, second)]
    samples = [sample for groups in sides for group in groups for sample in group]
    fewest = min((len(group) for groups in sides for group in groups), default=0)
    rows = []
    for measure in _measures(samples, powers(fewest)) if tasks else ():
        one, other = (measure.task_means(groups) for groups in sides)
        apart = other - one
        ends = share_difference_interval(apart) if measure.proportion else mean_interval(apart)
        low, high = (None if math.isnan(end) else end for end in ends)
        rows.append(
            MeasureDifference(
                name=measure.name,
                first=float(one.mean()),
                second=float(other.mean()),
                difference=float(apart.mean()),
                low=low,
                high=high,
            )
        )
    return rows
