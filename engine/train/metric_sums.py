"""Metrics of an update as sums that can be added over micro-batches and processes.

    metrics = MetricSums()
    for part in parts:
        loss, counted = objective(spec, part)
        metrics.merge(counted)
    metrics.result()                  # {"policy/approx_kl": 0.0021, …}: the one transfer off the device

A metric is a mean (stored as sum and count), a maximum, or an effective sample size (stored as count, sum and sum of
squares). The result does not depend on how the tokens were split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class MetricSums:
    """Sums and maxima by metric name: float64 tensors on the device of the values."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """[2]: sum of values, number of values."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """[1]: maximum of the values."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """[3]: count, sum and sum of squares of weights, for the effective sample size."""

    def mean(self, name: str, values: Tensor) -> None:
        """Add [n] values (numbers or bool) to the mean `name`."""
        total = values.detach().sum(dtype=torch.float64)
        _add(self.sums, name, torch.stack([total, torch.full_like(total, values.numel())]))

    def maximum(self, name: str, values: Tensor) -> None:
        """Add [n] values to the maximum `name`. Without values nothing is recorded."""
        if values.numel():
            _raise(self.maxima, name, values.detach().max().double().reshape(1))

    def effective_sample_size(self, name: str, weights: Tensor) -> None:
        """Add [n] weights to the effective sample size `name`."""
        values = weights.detach().double()
        total = values.sum()
        _add(self.weights, name, torch.stack([torch.full_like(total, values.numel()), total, values.square().sum()]))

    def merge(self, other: MetricSums) -> None:
        """Add the sums of another."""
        for name, pair in other.sums.items():
            _add(self.sums, name, pair)
        for name, peak in other.maxima.items():
            _raise(self.maxima, name, peak)
        for name, triple in other.weights.items():
            _add(self.weights, name, triple)

    def cpu(self) -> MetricSums:
        """A copy on the CPU, made in one transfer, to be sent to another process."""
        kinds = (self.sums, self.maxima, self.weights)
        held = [tensor for kind in kinds for tensor in kind.values()]
        if not held:
            return MetricSums()
        moved = iter(torch.split(torch.cat(held).cpu(), [len(tensor) for tensor in held]))
        return MetricSums(*({name: next(moved).clone() for name in kind} for kind in kinds))

    def result(self) -> dict[str, float]:
        """Values of all metrics with data. The effective sample size is given as a fraction of the number of tokens."""
        on_cpu = self.cpu()
        means = {name: total / count for name, (total, count) in _numbers(on_cpu.sums) if count}
        peaks = {name: peak for name, (peak,) in _numbers(on_cpu.maxima)}
        effective = {name: effective_sample_fraction(*sums) for name, sums in _numbers(on_cpu.weights) if sums[0]}
        return means | peaks | effective


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine metrics of several updates: the maximum for names that end in `max`, else the mean over the updates that
    have it."""
    names = dict.fromkeys(name for of_update in metrics for name in of_update)
    of_name = {name: [of_update[name] for of_update in metrics if name in of_update] for name in names}
    return {
        name: max(values) if name.endswith("max") else sum(values) / len(values) for name, values in of_name.items()
    }


def effective_sample_fraction(count: float, total: float, squares: float) -> float:
    """Kish's effective sample size of weights w as a fraction of n: (sum w)^2 / (n * sum w^2), from 1 / n to 1.

    Args:
        count: n.
        total: sum w.
        squares: sum w^2.

    Returns:
        The fraction; 0 if all weights are 0 or there are none.
    """
    return total * total / (count * squares) if count and squares else 0.0


def _numbers(tensors: dict[str, Tensor]) -> Iterable[tuple[str, list[float]]]:
    return [(name, tensor.tolist()) for name, tensor in tensors.items()]


def _add(kept: dict[str, Tensor], name: str, found: Tensor) -> None:
    kept[name] = kept[name] + found if name in kept else found


def _raise(kept: dict[str, Tensor], name: str, found: Tensor) -> None:
    kept[name] = torch.maximum(kept[name], found) if name in kept else found
