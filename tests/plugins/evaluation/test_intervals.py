"""Intervals: quantiles against published tables, and coverage of the stated 95 % with few tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import comb

import numpy as np
import pytest
from slow_cases import slow_but_each

from engine.plugins.evaluation.intervals import (
    beta_cdf,
    beta_quantile,
    mean_interval,
    proportion_interval,
    share_difference_interval,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (31, 2.03951), (1000, 1.96234)]
)
def test_quantiles_of_students_t(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize(("n", "k"), [(5, 2), (20, 3), (200, 150)])
def test_the_beta_distribution_is_the_binomial_sum(n: int, k: int) -> None:
    for x in (0.05, 0.3, 0.8):
        assert beta_cdf(x, k, n - k + 1) == pytest.approx(
            sum(comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(k, n + 1)), abs=1e-12
        )
        if 1e-9 < beta_cdf(x, k, n - k + 1) < 1 - 1e-9:
            assert beta_quantile(beta_cdf(x, k, n - k + 1), k, n - k + 1) == pytest.approx(x, abs=1e-6)


def test_with_one_episode_per_task_a_share_has_the_interval_of_clopper_and_pearson() -> None:
    """Figures of the binomial test in R."""
    assert proportion_interval(np.array([1.0] * 7 + [0.0] * 3), 10) == pytest.approx((0.3475471, 0.9332605), abs=1e-6)
    assert proportion_interval(np.ones(10), 10) == pytest.approx((0.6915029, 1.0), abs=1e-6)
    assert proportion_interval(np.zeros(10), 10) == pytest.approx((0.0, 0.3084971), abs=1e-6)


def test_tasks_that_all_agree_do_not_give_a_point() -> None:
    for value in (0.0, 0.5, 1.0):
        low, high = proportion_interval(np.full(3, value), 48)
        assert high - low > 0.6
    low, high = share_difference_interval(np.zeros(3))
    assert low == pytest.approx(-high)
    assert high > 0.5
    assert all(map(math.isnan, mean_interval(np.full(5, 0.25))))  # the spread of rewards cannot be estimated
    assert all(map(math.isnan, mean_interval(np.array([1.0]))))


@pytest.mark.parametrize("tasks", slow_but_each(3, [2, 3, 5, 8, 32]))
@pytest.mark.parametrize(
    ("true", "interval"),
    [
        pytest.param(
            0.9, lambda n, r: proportion_interval((r.random(n) < 0.9).astype(float), n), id="one episode each"
        ),
        pytest.param(
            0.8, lambda n, r: proportion_interval(r.binomial(4, r.beta(4, 1, n)) / 4, 4 * n), id="four episodes"
        ),
        pytest.param(0.3, lambda n, r: share_difference_interval((r.random(n) < 0.3).astype(float)), id="difference"),
        pytest.param(0.0, lambda n, r: mean_interval(r.normal(size=n)), id="rewards"),
    ],
)
def test_intervals_hold_with_few_tasks(
    tasks: int, true: float, interval: Callable[[int, np.random.Generator], tuple[float, float]]
) -> None:
    """The percentile bootstrap had .50 with 2 tasks, .71 with 3, .90 with 8."""
    random = np.random.default_rng(tasks)
    ends = [interval(tasks, random) for _ in range(200)]
    assert sum(low <= true <= high for low, high in ends) >= 0.92 * 200 - 2
