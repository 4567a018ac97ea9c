"""Compares the CPU time of two variants by many short pairs of runs, so that a few percent can be decided on a busy machine.

The two runs of a pair follow each other directly, so both meet the same load; which one is first alternates, so neither gains from
its place. The figure is the median of the ratios of the pairs, with a 95 % interval from resampling the pairs (bootstrap).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

RESAMPLES = 10_000


@dataclass
class Pairs:
    """CPU times of pairs of runs, in µs per turn."""

    base: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def run(self, base: Callable[[], float], other: Callable[[], float]) -> None:
        """Measure one more pair. Both functions return µs of CPU time per turn."""
        first = len(self.base) % 2 == 0
        for is_base in (first, not first):
            gc.collect()
            if is_base:
                self.base.append(base())
            else:
                self.other.append(other())

    def ratio(self) -> tuple[float, float, float]:
        """Median of other / base, and the ends of its 95 % interval."""
        return _interval(np.array(self.other) / np.array(self.base))

    def difference(self) -> tuple[float, float, float]:
        """Median of other - base in µs per turn, and the ends of its 95 % interval."""
        return _interval(np.array(self.other) - np.array(self.base))

    def __str__(self) -> str:
        ratio, low, high = self.ratio()
        saved, least, most = self.difference()
        return (
            f"{ratio:.3f} ({low:.3f} to {high:.3f})   {saved:6.1f} µs ({least:.1f} to {most:.1f})"
            f"   {np.median(self.base):.0f} -> {np.median(self.other):.0f} µs, {len(self.base)} pairs"
        )


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)
