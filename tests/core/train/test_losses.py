"""Losses against formulas written out for one token at a time, gradients in closed form, and extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.schemas.loss import LossSpec
from engine.schemas.train import TrainSpec
from engine.train.loss_columns import token_loss_weights
from engine.train.loss_tokens import LossTokens
from engine.train.losses import implementation, loss_ratio, objective
from engine.train.metric_sums import MetricSums
from engine.train.ratios import FLOOR, LIMIT

KINDS = ["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce", "ppo"]
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "ppo"]


def loss_spec(kind: str, **options: Any) -> LossSpec:
    found: LossSpec = TypeAdapter(LossSpec).validate_python({"kind": kind, **options})
    return found


def tokens_of(
    ratios: Sequence[float], advantages: Sequence[float], *, rows: Sequence[int] | None = None, old: float = -2.0
) -> LossTokens:
    """float64, the proximal and the sampler's log-probs `old`, loss_weights 1."""
    size = len(ratios)
    proximal = torch.full([size], old, dtype=torch.float64)
    groups = torch.tensor(rows if rows is not None else [0] * size, dtype=torch.int64)
    return LossTokens(
        logprobs=(proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        proximal=proximal,
        sampler=proximal.clone(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_weights=torch.ones(size, dtype=torch.float64),
        rows=groups,
        turns=groups,
    )


def policy_loss(loss: LossSpec, tokens: LossTokens) -> torch.Tensor:
    """Each token's loss, without loss weight and without rollout correction."""
    return implementation(loss).token_losses(tokens, loss_ratio(loss, tokens))


def value_and_slope(loss: LossSpec, tokens: LossTokens) -> tuple[list[float], list[float]]:
    """Each token's loss, and the gradient of their sum by each log-prob."""
    found = policy_loss(loss, tokens)
    (slope,) = torch.autograd.grad(found.sum(), tokens.logprobs)
    return found.tolist(), slope.tolist()


@pytest.mark.parametrize("kind", CLIPPED)
def test_the_clipped_surrogate_by_hand(kind: str) -> None:
    """Inside, above and below the bounds, for a good and a bad token: what is bounded has no gradient."""
    ratios = [1.1, 2.0, 0.5, 1.1, 2.0, 0.5, 3.0]
    advantages = [2.0, 2.0, 2.0, -1.0, -1.0, -1.0, 0.0]
    values, slopes = value_and_slope(loss_spec(kind, clip_low=0.2, clip_high=0.28), tokens_of(ratios, advantages))
    assert values == pytest.approx([-2.2, -2.56, -1.0, 1.1, 2.0, 0.8, 0.0], rel=1e-14)
    assert slopes == pytest.approx([-2.2, 0.0, -1.0, 1.1, 2.0, 0.0, 0.0], rel=1e-14)


def test_clip_higher_is_dapos_default() -> None:
    tokens = tokens_of([1.25, 1.25], [1.0, 1.0])
    assert value_and_slope(loss_spec("dapo"), tokens) == (
        pytest.approx([-1.25] * 2, rel=1e-14),
        pytest.approx([-1.25] * 2, rel=1e-14),
    )
    assert value_and_slope(loss_spec("grpo"), tokens) == (pytest.approx([-1.2] * 2, rel=1e-14), [0.0, 0.0])


@pytest.mark.parametrize("kind", CLIPPED)
def test_delta_bounds_only_bad_tokens(kind: str) -> None:
    loss = loss_spec(kind, clip_low=0.2, clip_high=0.2, delta=3.0)
    values, slopes = value_and_slope(loss, tokens_of([5.0, 2.0, 0.5, 5.0, 0.5], [-1.0, -1.0, -1.0, 1.0, 1.0]))
    assert values == pytest.approx([3.0, 2.0, 0.8, -1.2, -0.5], rel=1e-14)
    assert slopes == pytest.approx([0.0, 2.0, 0.0, 0.0, -0.5], rel=1e-14)


def test_gspo_is_the_papers_sequence_form() -> None:
    """-min(s A, clip(s) A) of each row, meaned: value and gradient, rows of different length, one of them clipped."""
    torch.manual_seed(0)
    lengths, advantages = [3, 5, 2], [1.0, -2.0, 1.5]
    moved = torch.tensor([0.5] * 3 + [0.5] * 5 + [-0.5] * 2) + torch.randn(10, dtype=torch.float64) * 0.1
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    tokens = tokens_of([1.0] * 10, [advantages[row] for row in rows], rows=rows)
    logprobs = (tokens.proximal + moved).requires_grad_()
    loss = loss_spec("gspo", clip_low=0.05, clip_high=0.02)
    loss_weights = torch.tensor(np.concatenate(token_loss_weights(loss, lengths, ["a", "b", "c"])))
    found = (loss_weights * policy_loss(loss, replace(tokens, logprobs=logprobs))).sum()
    parts = []
    for advantage, new, old in zip(advantages, logprobs.split(lengths), tokens.proximal.split(lengths), strict=True):
        ratio = (new.sum() - old.sum()).div(len(new)).exp()
        parts.append(-torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.02) * advantage))
    wanted = torch.stack(parts).mean()
    slopes = [torch.autograd.grad(each, logprobs)[0] for each in (found, wanted)]
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    torch.testing.assert_close(*slopes, rtol=1e-13, atol=1e-16)
    assert [bool(slope.any()) for slope in slopes[0].split(lengths)] == [False, True, True]


def test_gspo_gives_each_token_its_own_advantage() -> None:
    """GSPO-token: the row's ratio, 2, weighs each token's gradient by that token's advantage."""
    loss = loss_spec("gspo", clip_low=0.5, clip_high=2.0)
    values, slopes = value_and_slope(loss, tokens_of([4.0, 1.0], [1.0, -3.0]))
    assert values == pytest.approx([-2.0, 6.0], rel=1e-14)
    assert slopes == pytest.approx([-2.0, 6.0], rel=1e-14)


def test_cispo_cuts_no_gradient_off() -> None:
    loss = loss_spec("cispo", clip_low=0.2, clip_high=1.0)
    ratios, advantages = [1.5, 4.0, 0.5], [1.0, -1.0, 2.0]
    values, slopes = value_and_slope(loss, tokens_of(ratios, advantages))
    weights = [1.5, 2.0, 0.8]
    assert slopes == pytest.approx([-w * a for w, a in zip(weights, advantages, strict=True)], rel=1e-14)
    logprobs = [-2.0 + math.log(ratio) for ratio in ratios]
    assert values == pytest.approx([s * x for s, x in zip(slopes, logprobs, strict=True)], rel=1e-14)


def test_cispo_has_no_lower_bound_unless_one_is_given() -> None:
    _, slopes = value_and_slope(loss_spec("cispo"), tokens_of([0.01, 5.5], [1.0, 1.0]))
    assert slopes == pytest.approx([-0.01, -5.0], rel=1e-14)


def test_sapo_by_hand() -> None:
    """f(r) = 4 / tau * sigmoid(tau (r - 1)), f' = 4 sigmoid (1 - sigmoid), by log r: r f'."""
    loss = loss_spec("sapo", temperature_positive=1.0, temperature_negative=2.0)
    values, slopes = value_and_slope(loss, tokens_of([1.0, 2.0, 1.0, 2.0], [1.0, 1.0, -3.0, -3.0]))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    first, second = sigmoid(1.0), sigmoid(2.0)
    assert values == pytest.approx([-2.0, -4 * first, 3.0, 6 * second], rel=1e-14)
    assert slopes == pytest.approx(
        [-1.0, -2 * 4 * first * (1 - first), 3.0, 3 * 2 * 4 * second * (1 - second)], rel=1e-14
    )


def test_reinforce_by_hand() -> None:
    values, slopes = value_and_slope(loss_spec("reinforce"), tokens_of([1.0, 1.0], [3.0, -0.5], old=-2.0))
    assert values == [6.0, -1.0]
    assert slopes == [-3.0, 0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_update_has_the_policy_gradient(kind: str) -> None:
    """Where nothing has moved yet, every loss has the gradient -A grad log pi."""
    advantages = [1.5, -0.5, 0.0]
    _, slopes = value_and_slope(loss_spec(kind), tokens_of([1.0] * 3, advantages))
    assert slopes == pytest.approx([-advantage for advantage in advantages], rel=1e-14)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("cispo", "gspo")])
def test_gradients_are_those_of_the_values(kind: str) -> None:
    """CISPO's is not, by intent; nor is that of GSPO's token form, which the sequence form's checks above cover."""
    torch.manual_seed(1)
    tokens = tokens_of([1.0] * 12, torch.randn(12).tolist())
    logprobs = (tokens.proximal + torch.randn(12, dtype=torch.float64) * 0.3).requires_grad_()
    loss = loss_spec(kind, **({"delta": 1.5} if kind in CLIPPED else {}))
    assert torch.autograd.gradcheck(lambda logprobs: policy_loss(loss, replace(tokens, logprobs=logprobs)), logprobs)


def test_the_objective_by_hand() -> None:
    tokens = replace(
        tokens_of([1.1, 2.0], [1.0, 1.0]),
        loss_weights=torch.tensor([0.25, 0.5], dtype=torch.float64),
        sampler=torch.tensor([-2.0 - math.log(1.5), -2.0 - math.log(4.0)], dtype=torch.float64),
        reference=torch.tensor([-2.0, -2.0], dtype=torch.float64),
        entropy=torch.tensor([1.0, 3.0], dtype=torch.float64),
    )
    spec = TrainSpec.model_validate(
        {
            "loss": {"kind": "ppo"},
            "kl": {"coefficient": 0.1},
            "entropy_coefficient": 0.01,
            "rollout_correction": {"high": 2.0},
        }
    )
    k3 = [1 / 1.1 - 1 + math.log(1.1), 0.5 - 1 + math.log(2)]
    wanted = 0.25 * (-1.1 * 1.5 + 0.1 * k3[0] - 0.01) + 0.5 * (-1.2 * 2.0 + 0.1 * k3[1] - 0.03)
    found, metrics = objective(spec, tokens)
    assert found.item() == pytest.approx(wanted, rel=1e-14)
    logs, total = [math.log(1.1), math.log(2)], [1.65, 8.0]
    approx = [0.1 - logs[0], 1 - logs[1]]
    assert metrics.result() == pytest.approx(
        {
            "policy/approx_kl": sum(approx) / 2,
            "policy/token_kl_max": approx[1],
            "policy/ratio_max": 2.0,
            "policy/confidence": 3.1 * math.exp(-2) / 2,
            "policy/ess": sum(total) ** 2 / (2 * (1.65**2 + 64)),
            "policy/clip_low": 0.0,
            "policy/clip_high": 0.5,
            "policy/kl_ref": sum(k3) / 2,
            "policy/entropy": 2.0,
            "sampler/diff_mean": (math.log(1.5) + math.log(4)) / 2,
            "sampler/diff_max": math.log(4),
            "correction/weight_mean": 1.75,
            "correction/masked": 0.0,
        },
        rel=1e-12,
    )


def test_the_reference_is_measured_without_a_penalty_too() -> None:
    tokens = tokens_of([1.0], [1.0])
    plain, _ = objective(TrainSpec(), tokens)
    measured, metrics = objective(TrainSpec(), replace(tokens, reference=tokens.proximal - 1))
    assert measured.item() == plain.item()
    assert metrics.result()["policy/kl_ref"] == pytest.approx(math.exp(-1), rel=1e-12)


def test_the_entropy_bonus_has_a_gradient() -> None:
    entropy = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    tokens = replace(tokens_of([1.0, 1.0], [0.0, 0.0]), entropy=entropy)
    loss, _ = objective(TrainSpec(entropy_coefficient=0.3), tokens)
    assert torch.autograd.grad(loss, entropy)[0].tolist() == [-0.3, -0.3]


@pytest.mark.parametrize(
    ("asked", "named"), [({"kl": {"coefficient": 0.1}}, "reference"), ({"entropy_coefficient": 0.1}, "entropy")]
)
def test_what_is_missing_is_named(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"`LossTokens\.{named}`"):
        objective(TrainSpec.model_validate(asked), tokens_of([1.0], [1.0]))


@pytest.mark.parametrize("kind", [*CLIPPED, "gspo"])
def test_clips_are_counted_where_they_are_active(kind: str) -> None:
    """Above with a bad advantage, below with a good one: nothing is held there, nothing is counted."""
    ratios = [0.5, 0.5, 2.0, 2.0, 1.0, 5.0, 0.1, 2.0]
    advantages = [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 0.0]
    tokens = tokens_of(ratios, advantages, rows=range(8))
    options = {"clip_low": 0.2, "clip_high": 0.2}
    _, metrics = objective(TrainSpec(loss=loss_spec(kind, **options)), tokens)
    assert (metrics.result()["policy/clip_low"], metrics.result()["policy/clip_high"]) == (2 / 8, 1 / 8)
    _, metrics = objective(TrainSpec(loss=loss_spec(kind, delta=4.0, **options)), tokens)
    assert (metrics.result()["policy/clip_low"], metrics.result()["policy/clip_high"]) == (2 / 8, 2 / 8)


def test_cispos_bounds_count_whatever_the_sign() -> None:
    tokens = tokens_of([0.5, 0.5, 9.0, 9.0, 9.0], [1.0, -1.0, 1.0, -1.0, 0.0])
    _, metrics = objective(TrainSpec(loss=loss_spec("cispo", clip_low=0.2, clip_high=4.0)), tokens)
    assert (metrics.result()["policy/clip_low"], metrics.result()["policy/clip_high"]) == (2 / 5, 2 / 5)


@pytest.mark.parametrize("kind", ["sapo", "reinforce"])
def test_what_has_no_bounds_counts_no_clips(kind: str) -> None:
    _, metrics = objective(TrainSpec(loss=loss_spec(kind)), tokens_of([9.0], [1.0]))
    assert not {"policy/clip_low", "policy/clip_high"} & metrics.result().keys()


def test_the_samplers_log_probs_are_compared_with_the_trainers_own() -> None:
    """Not with the proximal ones where those are the sampler's: a broken pipeline would not show."""
    tokens = replace(tokens_of([1.5], [1.0]), sampler=torch.tensor([-5.0], dtype=torch.float64))
    assert objective(TrainSpec(), tokens)[1].result()["sampler/diff_max"] == pytest.approx(3.0)
    found = objective(TrainSpec(proximal_logprobs="sampler"), replace(tokens, proximal=tokens.sampler))[1].result()
    assert found["sampler/diff_max"] == pytest.approx(3 + math.log(1.5))


def random_step(seed: int, lengths: Sequence[int]) -> LossTokens:
    rng = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def drawn(scale: float) -> torch.Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64) * scale

    sampler = -3 + drawn(0.5)
    proximal = sampler + drawn(0.2)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossTokens(
        logprobs=(proximal + drawn(0.3)).requires_grad_(),
        proximal=proximal,
        sampler=sampler,
        advantages=drawn(1.0),
        loss_weights=torch.ones(size, dtype=torch.float64),
        rows=rows,
        turns=rows * 2 + torch.arange(size) % 2,
        reference=proximal + drawn(0.2),
        entropy=drawn(0.1) + 2,
    )


def part_of(tokens: LossTokens, kept: torch.Tensor) -> LossTokens:
    found = {each.name: getattr(tokens, each.name) for each in fields(LossTokens)}
    return LossTokens(**{name: None if value is None else value[kept] for name, value in found.items()})


@given(
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(["token", "turn", "sequence"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batches(
    kind: str, level: str, lengths: list[int], seed: int
) -> None:
    spec = TrainSpec.model_validate(
        {
            "loss": {"kind": kind},
            "kl": {"coefficient": 0.1},
            "entropy_coefficient": 0.01,
            "rollout_correction": {"kind": "mask", "level": level, "low": 0.8, "high": 1.2},
        }
    )
    loss_weights = token_loss_weights(spec.loss, lengths, [f"{row // 2}" for row in range(len(lengths))], length=64)
    whole = replace(random_step(seed, lengths), loss_weights=torch.tensor(np.concatenate(loss_weights)))
    loss, metrics = objective(spec, whole)
    (slope,) = torch.autograd.grad(loss, whole.logprobs)

    parts = np.random.default_rng(seed).integers(0, 3, len(lengths))
    logprobs = whole.logprobs.detach().clone().requires_grad_()
    summed, merged = torch.zeros((), dtype=torch.float64), MetricSums()
    for part in range(3):  # one may be empty: a part in which nothing trains adds nothing
        kept = torch.isin(whole.rows, torch.tensor(np.flatnonzero(parts == part)))
        found, counted = objective(spec, part_of(replace(whole, logprobs=logprobs), kept))
        found.backward()
        summed += found.detach()
        merged.merge(counted)
    torch.testing.assert_close(summed, loss.detach(), rtol=1e-12, atol=1e-14)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, slope, rtol=1e-12, atol=1e-14)
    assert merged.result() == pytest.approx(metrics.result(), rel=1e-12)


log_prob = st.one_of(
    st.floats(max_value=0.0, allow_nan=False, width=32), st.sampled_from([-math.inf, -3.4e38, FLOOR, -LIMIT, -0.0])
)


@given(
    kind=st.sampled_from(KINDS),
    correction=st.sampled_from(["none", "truncate", "mask"]),
    level=st.sampled_from(["token", "turn", "sequence"]),
    found=st.lists(st.tuples(log_prob, log_prob, log_prob, log_prob, st.floats(-100, 100, width=32)), max_size=5),
    wide=st.booleans(),
)
def test_extreme_log_probs_give_numbers(
    kind: str, correction: str, level: str, found: list[tuple[float, float, float, float, float]], wide: bool
) -> None:
    """In float32, with no bound on correction weights that matters: loss, gradient and metrics are finite."""
    columns = torch.tensor(found, dtype=torch.float32).reshape(-1, 5).T
    logprobs = columns[0].clone().requires_grad_()
    tokens = LossTokens(
        logprobs=logprobs,
        proximal=columns[1],
        sampler=columns[2],
        advantages=columns[4],
        loss_weights=torch.full_like(columns[4], 0.1),
        rows=torch.zeros(len(found)).long(),
        turns=torch.arange(len(found)) // 2,
        reference=columns[3],
        entropy=torch.zeros(len(found)),
    )
    options = {"kind": correction, "level": level, "high": 1e30 if wide else 2.0}
    for estimator in ("k1", "k2", "k3"):
        spec = TrainSpec.model_validate(
            {"loss": {"kind": kind}, "rollout_correction": options, "kl": {"coefficient": 0.1, "estimator": estimator}}
        )
        loss, metrics = objective(spec, tokens)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert math.isfinite(loss.item())
        assert slope.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.result().values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_is_not_covered_up(kind: str) -> None:
    tokens = tokens_of([1.0, 1.0], [1.0, 1.0])
    broken = replace(tokens, logprobs=torch.tensor([-1.0, math.nan], dtype=torch.float64, requires_grad=True))
    assert math.isnan(objective(TrainSpec(loss=loss_spec(kind)), broken)[0].item())
