"""Confidence intervals for means over few tasks.

Tasks are the independent units: episodes of one task share its difficulty, so only the number of tasks makes an
interval narrow.
`bench/intervals.py` measures how often these intervals contain the true value; docs/credit.md has the figures.

    values                          interval
    any numbers                     Student's t over task means
    0 or 1 in each episode          Clopper-Pearson with an effective sample size (Korn & Graubard 1998)
    differences of 0/1 episodes     Student's t over task differences, with two tasks added (after Bonett & Price 2012)

The second and third do not shrink to a point when all tasks agree, which with few tasks often happens by chance.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
FEW_TASKS = 10
"""Below this number of tasks a warning is shown: an interval is wide, and relies on task means that are about
normal."""
_NONE = (math.nan, math.nan)


def mean_interval(means: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student's t interval of the mean over tasks.

    Args:
        means: One mean per task, [tasks].
        confidence: Of the interval.

    Returns:
        Its two ends; NaN with fewer than two tasks, or if all are equal: then their spread cannot be estimated.
    """
    count = len(means)
    if count < 2:
        return _NONE
    spread = float(means.std(ddof=1))
    if spread <= 1e-12 * max(1.0, float(np.abs(means).max())):
        return _NONE
    half = t_quantile((1.0 + confidence) / 2.0, count - 1) * spread / math.sqrt(count)
    centre = float(means.mean())
    return centre - half, centre + half


def proportion_interval(means: Floats, episodes: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of the mean over tasks of a value that is 0 or 1 in each episode.

    Clopper and Pearson's interval with the number of independent episodes that would have the observed variance,
    reduced by the degrees of freedom (Korn & Graubard 1998, "Confidence intervals for proportions with small expected
    number of positive counts estimated from survey data"). If all tasks have the same mean, that variance says nothing,
    and each task counts as one episode.

    Args:
        means: The share of ones of each task, [tasks].
        episodes: Number of episodes of all tasks.
        confidence: Of the interval.

    Returns:
        Its two ends, within [0, 1]; NaN without tasks.
    """
    count = len(means)
    if count == 0:
        return _NONE
    centre, variance = float(means.mean()), float(means.var())
    effective = float(count)
    if variance > 1e-24:
        tail = (1.0 + confidence) / 2.0
        factor = 1.0 if episodes <= count else (t_quantile(tail, episodes - 1) / t_quantile(tail, count - 1)) ** 2
        effective = min(centre * (1.0 - centre) * count / variance * factor, float(episodes))
    tail = (1.0 - confidence) / 2.0
    ones = centre * effective
    low = beta_quantile(tail, ones, effective - ones + 1.0) if ones > 1e-12 else 0.0
    high = beta_quantile(1.0 - tail, ones + 1.0, effective - ones) if effective - ones > 1e-12 else 1.0
    return low, high


def share_difference_interval(differences: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of the mean over tasks of the difference of two shares, paired by task.

    Student's t over the differences and two more, one of each sign, as large as the largest that was seen (1 if all are
    0). With one episode per task and the normal quantile this is the interval of Bonett & Price 2012 ("Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data").

    Args:
        differences: One per task, within [-1, 1], [tasks].
        confidence: Of the interval.

    Returns:
        Its two ends, within [-1, 1]; NaN with fewer than two tasks.
    """
    count = len(differences)
    if count < 2:
        return _NONE
    size = float(np.abs(differences).max()) or 1.0
    more = np.append(differences, (size, -size))
    half = t_quantile((1.0 + confidence) / 2.0, count + 1) * float(more.std()) / math.sqrt(count + 2)
    centre = float(more.mean())
    return max(-1.0, centre - half), min(1.0, centre + half)


def t_quantile(p: float, freedom: float) -> float:
    """The quantile of Student's t distribution.

    Args:
        p: Between 0.5 and 1.
        freedom: Degrees of freedom, positive.
    """
    below = beta_quantile(2.0 * (1.0 - p), freedom / 2.0, 0.5)
    return math.sqrt(freedom * (1.0 / below - 1.0))


@functools.lru_cache(maxsize=1024)
def beta_quantile(p: float, a: float, b: float) -> float:
    """The quantile of the beta distribution with positive parameters a and b, by bisection; exact to about 1e-15."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if beta_cdf(middle, a, b) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    found = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            found *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return front * found
