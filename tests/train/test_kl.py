"""KL estimators: exact values, closed-form gradients, and what they estimate over a whole distribution."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.kl import penalized_rows, token_kl
from engine.train.ratios import LIMIT

Estimator = Literal["k1", "k2", "k3"]
LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", LOG2, 1.0), ("k2", LOG2**2 / 2, LOG2), ("k3", 0.5 - 1 + LOG2, 1 - 0.5)],
)
def test_values_and_gradients_where_the_policy_is_twice_as_likely(
    estimator: Estimator, value: float, slope: float
) -> None:
    logprobs = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    found = token_kl(estimator, logprobs, torch.tensor([math.log(0.25)], dtype=torch.float64))
    found.sum().backward()
    assert found.item() == pytest.approx(value, rel=1e-14)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-14)


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_equal_log_probs_are_no_divergence(estimator: Estimator) -> None:
    logprobs = torch.tensor([-0.1, -3.0, -math.inf], requires_grad=True)
    found = token_kl(estimator, logprobs, logprobs.detach())
    found.sum().backward()
    assert found.tolist() == [0, 0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == ([1, 1, 0] if estimator == "k1" else [0, 0, 0])


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_gradients_are_those_of_the_values(estimator: Estimator) -> None:
    torch.manual_seed(0)
    logprobs = (-torch.rand(20, dtype=torch.float64) * 4).requires_grad_()
    reference = -torch.rand(20, dtype=torch.float64) * 4
    assert torch.autograd.gradcheck(lambda logprobs: token_kl(estimator, logprobs, reference), logprobs)


def test_expectations_are_as_said() -> None:
    """Over all tokens of a distribution, weighed by the policy: what the values and the gradients estimate."""
    torch.manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    drawn = logprobs.exp().detach()
    forward = (logprobs.exp() * (logprobs - reference)).sum()
    reverse = (reference.exp() * (reference - logprobs)).sum()

    def slope(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    k1, k2, k3 = ((drawn * token_kl(name, logprobs, reference)).sum() for name in get_args(Estimator))
    torch.testing.assert_close(k1, forward, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(k3, forward, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope(k1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(slope(k2), slope(forward), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(slope(k3), slope(reverse), rtol=1e-10, atol=1e-12)


def test_k3_is_exact_up_to_the_limit_and_held_there() -> None:
    logprobs = torch.tensor([-LIMIT, -LIMIT - 1, -math.inf, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.0, 0.0, -math.inf], dtype=torch.float64)
    found = token_kl("k3", logprobs, reference)
    found.sum().backward()
    top = math.expm1(LIMIT) - LIMIT
    assert found.tolist() == pytest.approx([top, top, top, 9999.0], rel=1e-14)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.expm1(LIMIT), 0, 0, 1], rel=1e-14)


log_prob = st.floats(max_value=0.0, allow_nan=False, width=32)


@given(st.sampled_from(get_args(Estimator)), log_prob, log_prob)
def test_always_a_number(estimator: Estimator, policy: float, reference: float) -> None:
    logprobs = torch.tensor([policy], requires_grad=True)
    found = token_kl(estimator, logprobs, torch.tensor([reference]))
    found.sum().backward()
    assert math.isfinite(found.item())
    assert logprobs.grad is not None
    assert math.isfinite(logprobs.grad.item())
    assert estimator == "k1" or found.item() >= 0


def test_in_the_reward_a_token_pays_for_itself_and_what_follows() -> None:
    row = {
        "loss_mask": np.array([0, 1, 1, 0, 1]),
        "advantages": np.array([0.0, 1.0, 1.0, 0.0, 2.0], np.float32),
    }
    (changed,), mean = penalized_rows([row], [np.array([0.5, -0.25, 1.0], np.float32)], 2.0)
    assert changed["advantages"].tolist() == [0.0, 1.0 - 2 * 1.25, 1.0 - 2 * 0.75, 0.0, 2.0 - 2 * 1.0]
    assert mean == pytest.approx(1.25 / 3)
    assert row["advantages"].tolist() == [0.0, 1.0, 1.0, 0.0, 2.0]


def test_the_gradient_of_the_reward_penalty_is_that_of_the_sequence_kl() -> None:
    """Two tokens of three values: the expected update over all sequences, against autograd through the exact KL."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = [torch.randn(3, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)]
    one, two = first.log_softmax(-1), second.log_softmax(-1)
    exact, loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            chance = (one[a] + two[a, b]).exp()
            exact = exact + chance * (one[a] - reference[0][a] + two[a, b] - reference[1][b])
            kl = np.array([float((one[a] - reference[0][a]).detach()), float((two[a, b] - reference[1][b]).detach())])
            row = {"loss_mask": np.ones(2, int), "advantages": np.zeros(2, np.float32)}
            (changed,), _ = penalized_rows([row], [kl], 1.0)
            of = torch.tensor(changed["advantages"], dtype=torch.float64)
            loss = loss - chance.detach() * (of[0] * one[a] + of[1] * two[a, b])
    wanted = torch.autograd.grad(exact, (first, second), retain_graph=True)
    for found, want in zip(torch.autograd.grad(loss, (first, second)), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
