"""Tallies: exact numbers, however they were parted."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.metric_sums import MetricSums


def counted(values: list[float]) -> MetricSums:
    metrics = MetricSums()
    tensor = torch.tensor(values, dtype=torch.float32)
    metrics.mean("mean", tensor)
    metrics.maximum("peak", tensor)
    metrics.effective_sample_size("ess", tensor)
    return metrics


def test_exact_numbers() -> None:
    assert counted([3.0, 1.0]).result() == {"mean": 2.0, "peak": 3.0, "ess": 0.8}


def test_means_weigh_by_number() -> None:
    metrics = counted([6.0])
    metrics.merge(counted([0.0, 0.0]))
    assert metrics.result() == {"mean": 2.0, "peak": 6.0, "ess": pytest.approx(1 / 3, rel=1e-15)}


def test_truths_count_as_shares() -> None:
    metrics = MetricSums()
    metrics.mean("clipped", torch.tensor([True, False, False, True]))
    assert metrics.result() == {"clipped": 0.5}


def test_what_nothing_was_counted_for_is_left_out() -> None:
    assert counted([]).result() == {}
    assert MetricSums().result() == {}
    metrics = counted([])
    metrics.merge(counted([2.0]))
    assert metrics.result() == {"mean": 2.0, "peak": 2.0, "ess": 1.0}


def test_maxima_below_zero_stay_there() -> None:
    metrics = counted([-2.0])
    metrics.merge(counted([-3.0]))
    assert metrics.result()["peak"] == -2.0


def test_nothing_of_the_graph_is_kept() -> None:
    metrics = MetricSums()
    values = torch.ones(2, requires_grad=True) * 2
    metrics.mean("mean", values)
    metrics.maximum("peak", values)
    metrics.effective_sample_size("ess", values)
    kept = list(metrics.kept.values())
    assert not any(tensor.requires_grad for tensor in kept)


def test_goes_to_another_process_whole() -> None:
    metrics = counted([1.0, 2.0, 4.0])
    assert pickle.loads(pickle.dumps(metrics.cpu())).result() == metrics.result()


def test_nan_is_seen() -> None:
    metrics = counted([1.0])
    metrics.merge(counted([float("nan")]))
    assert all(value != value for value in metrics.result().values())


@given(st.lists(st.lists(st.integers(-64, 64).map(float), max_size=5), min_size=1, max_size=5))
def test_any_parting_gives_the_same(parts: list[list[float]]) -> None:
    whole = counted([value for part in parts for value in part])
    merged = MetricSums()
    for part in parts:
        merged.merge(counted(part))
    assert merged.result() == whole.result()
