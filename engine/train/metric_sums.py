"""Metrics of an update that add up over micro-batches, and over machines.

    metrics = MetricSums()
    for part in parts:
        loss, counted = objective(spec, part)
        metrics.merge(counted)
    metrics.result()                  # {"policy/approx_kl": 0.0021, …}: the one transfer off the device

A metric is a weighted mean (kept as sum and weight), a maximum, or the effective sample size (kept as count, sum and
sum of squares); all of them come out the same however the tokens were parted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.train.corrections import effective_sample_fraction


@dataclass(eq=False, slots=True)
class MetricSums:
    """Sums and maxima by name, float64 tensors on whatever device they were made on."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """[2]: sum of values, number of values."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """[1]."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """[3]: number, sum and sum of squares of weights, for the effective sample size."""

    def mean(self, name: str, values: Tensor) -> None:
        """Count [n] values (or bool) in the mean of that name."""
        total = values.detach().sum(dtype=torch.float64)
        _add(self.sums, name, torch.stack([total, torch.full_like(total, values.numel())]))

    def maximum(self, name: str, values: Tensor) -> None:
        """Count [n] values in the maximum of that name; no values, no maximum."""
        if values.numel():
            _raise(self.maxima, name, values.detach().max().double().reshape(1))

    def effective_sample_size(self, name: str, weights: Tensor) -> None:
        """Count [n] weights in the effective sample size of that name."""
        found = weights.detach().double()
        total = found.sum()
        _add(self.weights, name, torch.stack([torch.full_like(total, found.numel()), total, found.square().sum()]))

    def merge(self, other: MetricSums) -> None:
        """Take in what another counted."""
        for name, pair in other.sums.items():
            _add(self.sums, name, pair)
        for name, peak in other.maxima.items():
            _raise(self.maxima, name, peak)
        for name, triple in other.weights.items():
            _add(self.weights, name, triple)

    def cpu(self) -> MetricSums:
        """The same off the device, in one transfer: to be sent to another process."""
        kinds = (self.sums, self.maxima, self.weights)
        held = [tensor for kind in kinds for tensor in kind.values()]
        if not held:
            return MetricSums()
        moved = iter(torch.split(torch.cat(held).cpu(), [len(tensor) for tensor in held]))
        return MetricSums(*({name: next(moved).clone() for name in kind} for kind in kinds))

    def result(self) -> dict[str, float]:
        """Each metric that something was counted for. Of the effective sample size, the share of the tokens."""
        kept = self.cpu()
        means = {name: total / count for name, (total, count) in _numbers(kept.sums) if count}
        peaks = {name: peak for name, (peak,) in _numbers(kept.maxima)}
        effective = {name: effective_sample_fraction(*found) for name, found in _numbers(kept.weights) if found[0]}
        return means | peaks | effective


def _numbers(tensors: dict[str, Tensor]) -> Iterable[tuple[str, list[float]]]:
    return [(name, tensor.tolist()) for name, tensor in tensors.items()]


def _add(kept: dict[str, Tensor], name: str, found: Tensor) -> None:
    kept[name] = kept[name] + found if name in kept else found


def _raise(kept: dict[str, Tensor], name: str, found: Tensor) -> None:
    kept[name] = torch.maximum(kept[name], found) if name in kept else found
