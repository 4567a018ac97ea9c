"""Compares the CPU time of two variants by many short pairs of runs, so that a few percent can be decided on a busy machine.

The two runs of a pair follow each other directly, so both meet the same load; which one is first alternates, so neither gains from
its place. The figure is the median of the ratios of the pairs, with a 95 % interval from resampling the pairs (bootstrap).

Pairs of several processes can be pooled in a file (`saved`). This also averages over what differs between processes: the layout of
their memory and the seeds of their hashes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

RESAMPLES = 10_000


@dataclass
class Pairs:
    """CPU times of pairs of runs, in µs per turn."""

    base: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def add(self, base: float, other: float) -> None:
        """Add a pair. The two runs of it follow each other; which is first alternates."""
        self.base.append(base)
        self.other.append(other)

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


def saved(file: Path | None) -> dict[str, Pairs]:
    """The pairs in a file, by name; none if there is no such file."""
    if file is None or not file.is_file():
        return {}
    return {name: Pairs(**pairs) for name, pairs in json.loads(file.read_text()).items()}


def save(file: Path | None, found: Mapping[str, Pairs]) -> None:
    """Write pairs into a file; without a file, nothing."""
    if file is not None:
        file.write_text(json.dumps({name: asdict(pairs) for name, pairs in found.items()}))


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)
