"""Statistics of an evaluation: success by turn, pass@k, rewards by name, and how sure one may be of them.

Pure functions of finished episodes. Whose failure was not the policy's is left out and counted: a simulator that broke
says nothing about the policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.runner.stats import label
from engine.schemas.trajectory import Trajectory

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
"""Bootstrap resamples."""
CONFIDENCE = 0.95
_CELLS = 4_000_000


class Sample(NamedTuple):
    """What an evaluation needs of one episode."""

    task_id: str
    solved_turn: int | None
    """The assistant turn by which it was solved, from 0; None where it was not."""
    turns: int
    tokens: int
    reward: float
    rewards: Mapping[str, float]


class Estimate(NamedTuple):
    """A mean over episodes (or tasks), with its bootstrap interval."""

    value: float
    low: float
    high: float
    tasks: int
    """How many it is over."""

    def plain(self) -> dict[str, float | int | None]:
        """For JSON, where nothing to estimate from is null."""
        return {name: None if value != value else value for name, value in self._asdict().items()}


@dataclass(slots=True)
class Evaluation:
    """What a run shows of its policy."""

    tasks: int
    episodes: int
    """That are measured."""
    masked: Counter[str]
    """Episodes that are left out, by how they failed."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    """By name: `success`, `reward`, `turns`, `tokens`, `success@turn:<k>` (solved by turn k), `pass@<k>`,
    `reward:<name>`."""


def collect(trajectories: Iterable[Trajectory]) -> tuple[list[Sample], Counter[str]]:
    """The episodes that say something about the policy, and how the others failed."""
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
                trajectory.task_id,
                max(by, 0) if outcome.solved else None,
                turns,
                trajectory.counts.get("sampled_tokens", 0),
                outcome.reward,
                outcome.rewards,
            )
        )
    return samples, masked


def pass_at_k(episodes: int, solved: int, k: int) -> float:
    """The chance that at least one of k episodes is solved: 1 - C(n - c, k) / C(n, k).

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


def powers(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({*(2**power for power in range(most.bit_length())), most} - {0})


def by_task(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """A task's episodes, in order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.task_id, []).append(sample)
    return found


class _Metric(NamedTuple):
    """A ratio of sums over tasks."""

    name: str
    top: Callable[[Sequence[Sample]], float]
    bottom: Callable[[Sequence[Sample]], float]


def _mean(name: str, of: Callable[[Sample], float]) -> _Metric:
    return _Metric(name, lambda group: math.fsum(map(of, group)), len)


def _solved_by(turn: int) -> Callable[[Sample], float]:
    return lambda sample: float(sample.solved_turn is not None and sample.solved_turn <= turn)


def _reward_of(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.rewards.get(name, 0.0)


def _pass(k: int) -> _Metric:
    def chance(group: Sequence[Sample]) -> float:
        solved = sum(sample.solved_turn is not None for sample in group)
        return pass_at_k(len(group), solved, k) if len(group) >= k else 0.0

    return _Metric(f"pass@{k}", chance, lambda group: float(len(group) >= k))


def _basic(names: Iterable[str]) -> list[_Metric]:
    return [
        _mean("success", lambda sample: float(sample.solved_turn is not None)),
        _mean("reward", lambda sample: sample.reward),
        *(_mean(f"reward:{name}", _reward_of(name)) for name in sorted(names)),
        _mean("turns", lambda sample: float(sample.turns)),
        _mean("tokens", lambda sample: float(sample.tokens)),
    ]


def _names(samples: Iterable[Sample]) -> set[str]:
    return {name for sample in samples for name in sample.rewards}


def evaluate(trajectories: Iterable[Trajectory], *, seed: int = 0, resamples: int = RESAMPLES) -> Evaluation:
    """Everything that an evaluation tells.

    Args:
        trajectories: Finished episodes of a run.
        seed: Of the bootstrap: the same episodes and seed give the same intervals.
        resamples: Of the bootstrap.
    """
    samples, masked = collect(trajectories)
    tasks = by_task(samples)
    most = max((len(group) for group in tasks.values()), default=0)
    last = max((sample.solved_turn for sample in samples if sample.solved_turn is not None), default=-1)
    metrics = [
        *_basic(_names(samples)),
        *(_mean(f"success@turn:{turn}", _solved_by(turn)) for turn in range(last + 1)),
        *(_pass(k) for k in powers(most)),
    ]
    # Of a single task its episodes are what is resampled.
    units = list(tasks.values()) if len(tasks) != 1 else [[sample] for sample in samples]
    found = Evaluation(len(tasks), len(samples), masked)
    if not samples:
        return found
    top = np.array([[metric.top(unit) for metric in metrics] for unit in units], np.float64)
    bottom = np.array([[metric.bottom(unit) for metric in metrics] for unit in units], np.float64)
    whole = np.array([[metric.top(group), metric.bottom(group)] for group in [*tasks.values()] for metric in metrics])
    whole = whole.reshape(len(tasks), len(metrics), 2).sum(axis=0)
    low, high = bootstrap(top, bottom, seed=seed, resamples=resamples)
    for number, metric in enumerate(metrics):
        counted = sum(metric.bottom(group) > 0 for group in tasks.values())
        value = float(whole[number, 0] / whole[number, 1]) if whole[number, 1] else math.nan
        # Of one task alone, what is estimated over the whole group (pass@k) has nothing to be resampled by.
        alone = len(tasks) == 1 and metric.name.startswith("pass@")
        interval = (math.nan, math.nan) if alone else (float(low[number]), float(high[number]))
        found.estimates[metric.name] = Estimate(value, *interval, counted)
    return found


def bootstrap(
    top: Floats, bottom: Floats, *, seed: int, resamples: int, confidence: float = CONFIDENCE
) -> tuple[Floats, Floats]:
    """The percentile interval of ratios of sums, resampling rows with replacement (Efron & Tibshirani 1993, ch. 13).

    Args:
        top: [units, metrics]: what is summed above the line for each unit (a task: its episodes belong together).
        bottom: The same, below the line.
        seed: Of the generator.
        resamples: How many.
        confidence: Of the interval.

    Returns:
        Its two ends, [metrics]; NaN where nothing is below the line.
    """
    units = len(top)
    generator = np.random.Generator(np.random.PCG64(seed))
    ratios = []
    chunk = max(1, _CELLS // max(units, 1))
    for start in range(0, resamples, chunk):
        drawn = generator.multinomial(units, np.full(units, 1.0 / units), size=min(chunk, resamples - start))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios.append((drawn @ top) / (drawn @ bottom))
    found = np.concatenate(ratios)
    tail = (1.0 - confidence) / 2.0
    ends = np.full((2, top.shape[1]), math.nan)
    for metric in range(top.shape[1]):
        column = found[:, metric]
        column = column[np.isfinite(column)]
        if len(column):
            ends[:, metric] = np.quantile(column, [tail, 1.0 - tail])
    return ends[0], ends[1]


class Difference(NamedTuple):
    """One measure of two runs over the same tasks."""

    first: float
    second: float
    difference: float
    """The mean over tasks of the second's mean less the first's."""
    low: float
    high: float

    def plain(self) -> dict[str, float | None]:
        """For JSON, where nothing to estimate from is null."""
        return {name: None if value != value else value for name, value in self._asdict().items()}


@dataclass(slots=True)
class Comparison:
    """Two runs, task by task."""

    tasks: int
    """That both have, and that are the same in both."""
    only_first: int
    only_second: int
    changed: int
    """Tasks of one name that are not the same: left out."""
    masked: tuple[int, int]
    """Episodes whose failure was not the policy's: left out."""
    differences: dict[str, Difference] = field(default_factory=dict)


def compare(
    first: Iterable[Trajectory],
    second: Iterable[Trajectory],
    same: Callable[[str], bool] = lambda task_id: True,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """The second run against the first, paired by task: what a task is like falls out of the difference.

    The measures are those of `evaluate`; pass@k up to the fewest episodes that a task has in either run.

    Args:
        first: Finished episodes of one run.
        second: Of the other.
        same: Whether a task that both have is the same in both.
        seed: Of the bootstrap over tasks.
        resamples: Of the bootstrap.
    """
    (ones, masked_one), (others, masked_other) = collect(first), collect(second)
    left, right = by_task(ones), by_task(others)
    both = [task for task in left if task in right]
    paired = [task for task in both if same(task)]
    found = Comparison(
        tasks=len(paired),
        only_first=len(left) - len(both),
        only_second=len(right) - len(both),
        changed=len(both) - len(paired),
        masked=(masked_one.total(), masked_other.total()),
    )
    if not paired:
        return found
    both_of = [sample for task in paired for sample in (*left[task], *right[task])]
    last = max((sample.solved_turn for sample in both_of if sample.solved_turn is not None), default=-1)
    fewest = min(len(side[task]) for side in (left, right) for task in paired)
    metrics = [
        *_basic(_names(both_of)),
        *(_mean(f"success@turn:{turn}", _solved_by(turn)) for turn in range(last + 1)),
        *(_pass(k) for k in powers(fewest) if k > 1),
    ]
    means = np.array(
        [[[m.top(side[task]) / m.bottom(side[task]) for m in metrics] for task in paired] for side in (left, right)]
    )
    apart = means[1] - means[0]
    low, high = bootstrap(apart, np.ones_like(apart), seed=seed, resamples=resamples)
    if len(paired) == 1:  # nothing to resample
        low, high = np.full_like(low, math.nan), np.full_like(high, math.nan)
    for number, metric in enumerate(metrics):
        one, other, between = means[0, :, number].mean(), means[1, :, number].mean(), apart[:, number].mean()
        found.differences[metric.name] = Difference(*map(float, (one, other, between, low[number], high[number])))
    return found
