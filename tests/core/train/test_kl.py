"""KL estimators: exact values, closed-form gradients, and what they estimate over a whole distribution."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_rows import row_of

from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.schemas.credit import TurnReturnCredit
from engine.train.credited_rows import credited_columns
from engine.train.ratios import LIMIT, token_kl

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


@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "mean"])
def test_the_gradient_of_the_reward_penalty_is_that_of_the_kl_of_whole_episodes(baseline: str) -> None:
    """Episodes of two turns of one token of three values, the second in a later branch, in groups of two: the expected update over
    all groups, against autograd through the exact KL. A group's `mean` keeps a half of it."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = [torch.randn(3, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)]
    one, two = first.log_softmax(-1), second.log_softmax(-1)
    episodes = list(product(range(3), repeat=2))
    chances = {(a, b): (one[a] + two[a, b]).exp() for a, b in episodes}
    kl = {
        (a, b): [float((one[a] - reference[0][a]).detach()), float((two[a, b] - reference[1][b]).detach())]
        for a, b in episodes
    }
    exact = torch.stack([chances[each].log() * chances[each] for each in episodes]).sum()
    exact = exact - sum((chances[a, b] * (reference[0][a] + reference[1][b]) for a, b in episodes), torch.zeros(()))
    group = {f"t/{sample}": Member(ledger=Ledger().seal(2)) for sample in range(2)}
    loss = torch.zeros((), dtype=torch.float64)
    for both in product(episodes, repeat=2):
        rows, costs = [], []
        for sample, episode in enumerate(both):
            for turn in range(2):
                ids = {"episode_id": f"t/{sample}", "group": group, "input_ids": np.zeros(1, np.int32)}
                rows.append(row_of(ids, turn_ids=[turn], loss_mask=[1]))
                costs.append(np.array([kl[episode][turn]]))
        weights = [
            row.advantages[0] for row in credited_columns(rows, TurnReturnCredit(baseline=baseline), penalties=costs)
        ]
        chance = (chances[both[0]] * chances[both[1]]).detach()
        for sample, (a, b) in enumerate(both):
            loss = loss - chance * (weights[2 * sample] * one[a] + weights[2 * sample + 1] * two[a, b]) / 2
    kept = 0.5 if baseline == "mean" else 1.0
    wanted = torch.autograd.grad(kept * exact, (first, second), retain_graph=True)
    for found, want in zip(torch.autograd.grad(loss, (first, second)), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
