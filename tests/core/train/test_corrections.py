"""Corrections: exact weights at every level, and that the two factors of decoupled PPO come to one ratio."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.schemas.loss import PpoLoss, ReinforceLoss
from engine.schemas.train import RolloutCorrectionSpec, TrainSpec
from engine.train.loss_tokens import LossTokens
from engine.train.losses import objective
from engine.train.metric_sums import MetricSums
from engine.train.ratios import correction_weights

RATIOS = [4.0, 1.0, 0.25, 2.0, 8.0, 1.0]
"""proximal / sampler of six tokens: rows of 4 and 2, turns of 2, 2 and 2."""


def tokens_of(
    ratios: list[float], *, rows: list[int] | None = None, turns: list[int] | None = None, requires_grad: bool = False
) -> LossTokens:
    size = len(ratios)
    sampler = torch.full([size], -3.0, dtype=torch.float64)
    proximal = sampler + torch.tensor(ratios, dtype=torch.float64).log()
    return LossTokens(
        logprobs=proximal.clone().requires_grad_(requires_grad),
        proximal=proximal,
        sampler=sampler,
        advantages=torch.ones(size, dtype=torch.float64),
        loss_weights=torch.ones(size, dtype=torch.float64),
        rows=torch.tensor(rows or [0] * size),
        turns=torch.tensor(turns or [0] * size),
    )


def six() -> LossTokens:
    return tokens_of(RATIOS, rows=[5, 5, 5, 5, 2, 2], turns=[0, 0, 1, 1, 9, 9])


ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", RATIOS),
        ("turn", [2.0, 2.0, ROOT, ROOT, 8**0.5, 8**0.5]),
        ("sequence", [2**0.25] * 4 + [8**0.5] * 2),
    ],
)
def test_ratios_at_each_level(level: str, expected: list[float]) -> None:
    found, _ = correction_weights(RolloutCorrectionSpec.model_validate({"level": level, "high": 100.0}), six())
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


def test_truncation_holds_the_weight_between_its_bounds() -> None:
    weights, masked = correction_weights(RolloutCorrectionSpec(kind="truncate", low=0.5, high=3.0), six())
    assert weights.tolist() == pytest.approx([3.0, 1.0, 0.5, 2.0, 3.0, 1.0], rel=1e-14)
    assert not masked.any()


def test_masking_drops_what_is_outside_and_leaves_the_rest() -> None:
    weights, masked = correction_weights(RolloutCorrectionSpec(kind="mask", low=0.5, high=3.0), six())
    assert weights.tolist() == pytest.approx([0.0, 1.0, 0.0, 2.0, 0.0, 1.0], rel=1e-14)
    assert masked.tolist() == [True, False, True, False, True, False]


def test_masking_a_turn_drops_all_its_tokens_and_no_other_turns() -> None:
    weights, masked = correction_weights(RolloutCorrectionSpec(kind="mask", level="turn", low=0.5, high=2.5), six())
    assert weights.tolist() == pytest.approx([2, 2, ROOT, ROOT, 0, 0], rel=1e-14)
    assert masked.tolist() == [False, False, False, False, True, True]


def test_none_weighs_all_alike() -> None:
    assert correction_weights(RolloutCorrectionSpec(kind="none"), six())[0].tolist() == [1.0] * 6


def test_bounds_themselves_are_inside() -> None:
    weights, _ = correction_weights(RolloutCorrectionSpec(kind="mask", low=1.0, high=2.0), tokens_of([1.0, 1.0]))
    assert weights.tolist() == [1.0, 1.0]


def test_weights_have_no_gradient() -> None:
    tokens = tokens_of([2.0, 4.0], requires_grad=True)
    aliased = replace(tokens, proximal=tokens.logprobs)
    assert not correction_weights(RolloutCorrectionSpec(high=9.0), aliased)[0].requires_grad


@pytest.mark.parametrize(("kind", "expected"), [("truncate", [2.0, 0.0]), ("mask", [0.0, 0.0])])
def test_log_probs_of_minus_infinity_are_weighed(kind: str, expected: list[float]) -> None:
    spec = RolloutCorrectionSpec.model_validate({"kind": kind, "low": 0.0 if kind == "truncate" else 0.5})
    tokens = tokens_of([1.0, 1.0])
    tokens.sampler[0] = -math.inf
    tokens.proximal[1] = -math.inf
    assert correction_weights(spec, tokens)[0].tolist() == expected


def test_two_infinities_are_no_difference() -> None:
    tokens = tokens_of([1.0])
    tokens.sampler[0] = tokens.proximal[0] = -math.inf
    assert correction_weights(RolloutCorrectionSpec(), tokens)[0].tolist() == [1.0]


def test_decoupled_factors_come_to_current_over_sampler() -> None:
    """current / proximal * proximal / sampler, with wide bounds: the gradient is that of plain importance sampling."""
    spec = TrainSpec(loss=PpoLoss(clip_low=1.0, clip_high=99.0), rollout_correction=RolloutCorrectionSpec(high=100.0))
    base = tokens_of(RATIOS)
    logprobs = (base.proximal + torch.linspace(-1, 1, 6, dtype=torch.float64)).requires_grad_()
    tokens = replace(base, logprobs=logprobs)
    loss, _ = objective(spec, tokens)
    plain = -(logprobs - base.sampler).exp().sum()
    torch.testing.assert_close(loss, plain, rtol=1e-13, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(each, logprobs)[0] for each in (loss, plain)), rtol=1e-13, atol=0)


def test_only_the_current_ratio_is_clipped() -> None:
    """A token four times as likely as when sampled is not clipped while the trainer has not moved (AReaL)."""
    tokens = tokens_of([4.0], requires_grad=True)
    loss, metrics = objective(TrainSpec(loss=PpoLoss(), rollout_correction=RolloutCorrectionSpec(high=8.0)), tokens)
    loss.backward()
    assert loss.item() == pytest.approx(-4.0, rel=1e-14)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-4.0], rel=1e-14)
    assert metrics.result()["policy/clip_high"] == 0


def test_a_proximal_policy_that_is_the_samplers_needs_no_correction() -> None:
    tokens = tokens_of([1.0, 1.0])
    moved = replace(tokens, logprobs=tokens.logprobs + 1)
    assert correction_weights(RolloutCorrectionSpec(), moved)[0].tolist() == [1.0, 1.0]


def test_the_penalties_are_not_corrected() -> None:
    base = tokens_of([4.0])
    entropy = torch.tensor([3.0], dtype=torch.float64)
    tokens = replace(base, reference=base.logprobs - 1.0, entropy=entropy)
    spec = TrainSpec.model_validate(
        {"loss": {"kind": "reinforce"}, "kl": {"coefficient": 0.5, "estimator": "k1"}, "entropy_coefficient": 0.1}
    )
    assert isinstance(spec.loss, ReinforceLoss)
    loss, _ = objective(spec, tokens)
    assert loss.item() == pytest.approx(2 * (3 - math.log(4)) + 0.5 - 0.3, rel=1e-14)


@pytest.mark.parametrize(
    ("weights", "shares"), [([1, 1, 1, 1], [1.0]), ([1, 0, 0, 0], [0.25]), ([3, 1], [0.8]), ([0, 0], [0.0]), ([], [])]
)
def test_effective_share(weights: list[float], shares: list[float]) -> None:
    sums = MetricSums()
    sums.effective_sample_size("ess", torch.tensor(weights))
    assert list(sums.result().values()) == shares


@given(
    st.lists(st.tuples(st.floats(0.01, 50), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from(["token", "turn", "sequence"]),
)
def test_weights_do_not_depend_on_what_other_rows_are_there(found: list[tuple[float, int]], level: str) -> None:
    rows = [row for _, row in found]
    ratios = [ratio for ratio, _ in found]
    spec = RolloutCorrectionSpec.model_validate({"level": level, "high": 3.0})
    whole = correction_weights(spec, tokens_of(ratios, rows=rows, turns=rows))[0]
    for row in set(rows):
        alone = [ratio for ratio, of in found if of == row]
        part = correction_weights(spec, tokens_of(alone, rows=[row] * len(alone), turns=[row] * len(alone)))[0]
        torch.testing.assert_close(part, whole[torch.tensor(rows) == row], rtol=1e-13, atol=0)
