"""The clipped value loss: its values worked out by hand, and its gradient checked by finite differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_credited_rows import LEDGER, ONE, row

from engine.plugins.critic.critic import value_losses, value_metrics, value_objective
from engine.plugins.critic.spec import ProbeCritic
from engine.schemas.credit import read_credit
from engine.train.credited_rows import credited_columns

numbers = st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 3))


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # not moved: half the square of the error
        (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9),  # moved by less than the clip of 0.2
        (1.5, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved past the clip towards the target: the clipped value 1.2 decides
        (0.5, 1.0, 3.0, 0.5 * 2.5**2, -2.5),  # moved away from the target: it is not clipped
        (3.4, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # past the target: the clipped value is further from it
        (6.0, 1.0, 3.0, 0.5 * 3.0**2, 3.0),  # so far past it that the value itself is further
    ],
)
def test_each_case_by_hand(value: float, old: float, target: float, loss: float, slope: float) -> None:
    values = double(value).requires_grad_()
    losses, clipped = value_losses(values, double(old), double(target), 0.2)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.tolist() == pytest.approx([loss])
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([slope])
    assert clipped.tolist() == [slope == 0.0]


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5), st.sampled_from([None, 0.1, 1.0]))
def test_the_gradient_is_that_of_finite_differences(
    cases: list[tuple[float, float, float]], clip: float | None
) -> None:
    """Except at the corners of the loss, where there are two slopes."""
    away = [
        (value + 0.01 * (abs(abs(value - old) - (clip or 9.0)) < 1e-4), old, target) for value, old, target in cases
    ]
    values, old, target = (double(*column) for column in zip(*away, strict=True))
    losses, _ = value_losses(values, old, target, clip)
    plain = 0.5 * (values - target) ** 2
    assert bool((losses >= plain - 1e-12).all())  # the clip only raises the loss
    if clip is not None:
        clamped = 0.5 * (values.clamp(old - clip, old + clip) - target) ** 2
        corner = bool(((plain - clamped).abs() < 1e-6).any()) and not bool(torch.allclose(plain, clamped))
        if corner:
            return
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_losses(v, old, target, clip)[0], (values,), eps=1e-7, atol=1e-5)


def test_only_weighted_tokens_count_and_the_metrics_are_means_over_them() -> None:
    values = double(1.5, 0.0, 7.0).requires_grad_()
    old, returns, weights = double(1.0, 0.0, 7.0), double(3.0, 1.0, -50.0), double(0.5, 0.5, 0.0)
    loss, metrics = value_objective(ProbeCritic(), values, old, returns, weights)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.5 * (0.5 * 1.8**2 + 0.5))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.5, 0.0])
    assert metrics.result() == pytest.approx({"critic/loss": 0.5 * (0.5 * 1.8**2 + 0.5), "critic/clip_fraction": 0.5})


def test_an_empty_micro_batch_is_zero() -> None:
    empty = double()
    loss, metrics = value_objective(ProbeCritic(), empty, empty, empty, empty)
    assert (loss.item(), metrics.result()) == (0.0, {})


def test_the_metrics_are_over_trained_values() -> None:
    credit = read_credit({"method": "turn_ppo", "gamma": 1.0, "lam": 1.0})
    (found,) = credited_columns([row(ONE, LEDGER)], credit, values=[np.array([4.0, 99.0, 2.0])], by_turn=True)
    # targets 5 and 4; values 4 and 2: errors 1 and 2
    assert value_metrics([found]) == pytest.approx(
        {"critic/value_mean": 3.0, "critic/return_mean": 4.5, "critic/explained_variance": 1 - 0.25 / 0.25}
    )
    (exact,) = credited_columns([row(ONE, LEDGER)], credit, values=[np.array([5.0, 0.0, 4.0])], by_turn=True)
    assert value_metrics([exact])["critic/explained_variance"] == 1.0
    assert exact.row.on_tokens(exact.advantages).tolist() == [0.0] * 5
    assert "critic/explained_variance" not in value_metrics(
        [replace(exact, extra={**exact.extra, "returns": np.ones(3)})]
    )
