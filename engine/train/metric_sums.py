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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class MetricSums:
    """Sums and maxima by metric name: float64 tensors on the device of the values."""

    kept: dict[str, Tensor] = field(default_factory=dict)
    """[1]: maximum. [2]: sum and number of values. [3]: number, sum and sum of squares, for the effective sample
    size."""

    def mean(self, name: str, values: Tensor) -> None:
        """Add [n] values (numbers or bool) to the mean `name`."""
        total = values.detach().sum(dtype=torch.float64)
        self._add(name, torch.stack([total, torch.full_like(total, values.numel())]))

    def maximum(self, name: str, values: Tensor) -> None:
        """Add [n] values to the maximum `name`. Without values nothing is recorded."""
        if values.numel():
            self._add(name, values.detach().max().double().reshape(1))

    def effective_sample_size(self, name: str, weights: Tensor) -> None:
        """Add [n] weights to the effective sample size `name`."""
        values = weights.detach().double()
        total = values.sum()
        self._add(name, torch.stack([torch.full_like(total, values.numel()), total, values.square().sum()]))

    def _add(self, name: str, more: Tensor) -> None:
        before = self.kept.get(name)
        if before is not None:
            more = torch.maximum(before, more) if len(more) == 1 else before + more
        self.kept[name] = more

    def merge(self, other: MetricSums) -> None:
        """Add the sums of another."""
        for name, more in other.kept.items():
            self._add(name, more)

    def cpu(self) -> MetricSums:
        """A copy on the CPU, made in one transfer, to be sent to another process."""
        if not self.kept:
            return MetricSums()
        sizes = [len(tensor) for tensor in self.kept.values()]
        moved = torch.split(torch.cat(list(self.kept.values())).cpu(), sizes)
        return MetricSums({name: tensor.clone() for name, tensor in zip(self.kept, moved, strict=True)})

    def result(self) -> dict[str, float]:
        """Values of all metrics with data. The effective sample size is given as a fraction of the number of tokens."""
        numbers = {name: tensor.tolist() for name, tensor in self.cpu().kept.items()}
        means = {name: total[0] / total[1] for name, total in numbers.items() if len(total) == 2 and total[1]}
        peaks = {name: peak[0] for name, peak in numbers.items() if len(peak) == 1}
        effective = {  # Kish's, of n weights w: (sum w)^2 / (n * sum w^2), from 1 / n to 1; 0 if all weights are 0
            name: sums[1] ** 2 / (sums[0] * sums[2]) if sums[2] else 0.0
            for name, sums in numbers.items()
            if len(sums) == 3 and sums[0]
        }
        return means | peaks | effective


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine metrics of several updates: the maximum for names that end in `max`, else the mean over the updates that
    have it."""
    names = dict.fromkeys(name for of_update in metrics for name in of_update)
    of_name = {name: [of_update[name] for of_update in metrics if name in of_update] for name in names}
    return {
        name: max(values) if name.endswith("max") else sum(values) / len(values) for name, values in of_name.items()
    }
