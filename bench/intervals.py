"""How often the 95 % intervals of `engine eval` and `engine compare` contain the true value, by number of tasks.

    python bench/intervals.py                  # the tables of docs/credit.md, about a minute
    python bench/intervals.py --draws 500

Tasks are drawn at random from distributions whose true value is known, and episodes are drawn from each task. A figure is the smallest
coverage over the distributions, and in parentheses the mean width for the first. The last column is the percentile bootstrap over
tasks, for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from engine.plugins.evaluation.intervals import Floats, mean_interval, proportion_interval, share_difference_interval

TASKS = (2, 3, 5, 8, 16, 32)
EPISODES = (1, 4, 16)
Draw = Callable[[np.random.Generator, int], Floats]

SOLVE_RATES: dict[str, tuple[Draw, float]] = {
    "every task 0.5": (lambda random, n: np.full(n, 0.5), 0.5),
    "every task 0.9": (lambda random, n: np.full(n, 0.9), 0.9),
    "70 % always, 30 % never": (lambda random, n: (random.random(n) < 0.7).astype(float), 0.7),
    "beta(0.5, 0.5)": (lambda random, n: random.beta(0.5, 0.5, n), 0.5),
    "beta(4, 1)": (lambda random, n: random.beta(4.0, 1.0, n), 0.8),
}
REWARDS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda random, n: random.normal(1.0, 1.0, n), 1.0),
    "uniform": (lambda random, n: random.uniform(0.0, 1.0, n), 0.5),
    "exponential": (lambda random, n: random.exponential(1.0, n), 1.0),
}


def bootstrap(means: Floats, random: np.random.Generator) -> tuple[float, float]:
    """The percentile bootstrap over tasks."""
    drawn = random.multinomial(len(means), np.full(len(means), 1.0 / len(means)), size=500) @ means / len(means)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def coverage(draws: int, true: float, ends: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Share of intervals that contain the true value, and their mean width. An interval that is not given counts as missing."""
    found = np.array([ends() for _ in range(draws)])
    hit = (found[:, 0] <= true + 1e-12) & (true - 1e-12 <= found[:, 1])
    given = found[~np.isnan(found[:, 0])]
    return float(hit.mean()), float((given[:, 1] - given[:, 0]).mean()) if len(given) else float("nan")


def shares(draws: int, random: np.random.Generator, tasks: int, episodes: int) -> list[tuple[float, ...]]:
    """Coverage and width of `proportion_interval`, and coverage of the bootstrap, for each distribution."""
    found = []
    for rates, true in SOLVE_RATES.values():

        def means(rates: Draw = rates) -> Floats:
            return random.binomial(episodes, rates(random, tasks)) / episodes

        ours = coverage(draws, true, lambda means=means: proportion_interval(means(), tasks * episodes))
        found.append((*ours, coverage(draws // 4, true, lambda means=means: bootstrap(means(), random))[0]))
    return found


def differences(draws: int, random: np.random.Generator, tasks: int, episodes: int) -> list[tuple[float, ...]]:
    """The same for `share_difference_interval`: two runs of equal policies, and runs of which the second solves more tasks."""
    found = []
    for rates, _ in SOLVE_RATES.values():

        def equal(rates: Draw = rates) -> Floats:
            drawn = rates(random, tasks)
            return (random.binomial(episodes, drawn) - random.binomial(episodes, drawn)) / episodes

        ours = coverage(draws, 0.0, lambda equal=equal: share_difference_interval(equal()))
        found.append((*ours, coverage(draws // 4, 0.0, lambda equal=equal: bootstrap(equal(), random))[0]))
    for gain in (0.1, 0.3, 0.6):

        def gained(gain: float = gain) -> Floats:
            return (random.random(tasks) < gain).astype(float)

        ours = coverage(draws, gain, lambda gained=gained: share_difference_interval(gained()))
        found.append((*ours, coverage(draws // 4, gain, lambda gained=gained: bootstrap(gained(), random))[0]))
    return found


def rewards(draws: int, random: np.random.Generator, tasks: int, shape: str) -> list[tuple[float, ...]]:
    """The same for `mean_interval`."""
    drawn, true = REWARDS[shape]
    ours = coverage(draws, true, lambda: mean_interval(drawn(random, tasks)))
    return [(*ours, coverage(draws // 4, true, lambda: bootstrap(drawn(random, tasks), random))[0])]


def row(name: str, of: Callable[[int], list[tuple[float, ...]]]) -> None:
    """Print a line of the table."""
    cells = []
    for tasks in TASKS:
        found = of(tasks)
        cells.append(f"{min(each[0] for each in found):.2f} ({found[0][1]:.2f}) / {min(each[2] for each in found):.2f}")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="intervals per figure (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random = np.random.default_rng(given.seed)
    print(f"| values | {' | '.join(f'{tasks} tasks' for tasks in TASKS)} |")
    print(f"|---|{'---|' * len(TASKS)}")
    for episodes in EPISODES:
        row(f"0/1, {episodes} per task", lambda tasks, m=episodes: shares(given.draws, random, tasks, m))
    for episodes in EPISODES:
        row(f"difference, {episodes} per task", lambda tasks, m=episodes: differences(given.draws, random, tasks, m))
    for shape in REWARDS:
        row(f"rewards, {shape}", lambda tasks, shape=shape: rewards(given.draws, random, tasks, shape))


if __name__ == "__main__":
    main()
