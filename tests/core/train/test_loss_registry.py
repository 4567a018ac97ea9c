"""Losses are their declarations: what a config class says of itself is what its formula does, and nothing asks for its kind."""

from __future__ import annotations

import inspect
from typing import ClassVar, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.schemas.loss import LOSSES as OPEN
from engine.schemas.loss import Denominator, Loss
from engine.schemas.train import TrainSpec
from engine.train.loss_columns import token_loss_weights
from engine.train.loss_tokens import LossTokens
from engine.train.losses import PolicyLoss, loss_ratio, objective
from engine.train.losses.formulas import implementation

LOSSES = OPEN.members()


def tokens_of(ratios: list[float], rows: list[int]) -> LossTokens:
    size = len(ratios)
    old = torch.full([size], -2.0, dtype=torch.float64)
    return LossTokens(
        logprobs=(old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        proximal=old,
        sampler=old.clone(),
        advantages=torch.linspace(-1, 1, size, dtype=torch.float64),
        loss_weights=torch.ones(size, dtype=torch.float64),
        rows=torch.tensor(rows),
        turns=torch.tensor(rows),
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_each_loss_declares_every_fact(loss: type[Loss]) -> None:
    own = {name for name in inspect.get_annotations(Loss) if hasattr(loss, name)}
    assert own == {"formula", "ratio_level", "clips_ratio", "denominator", "ratio_keys"}
    assert loss.denominator in get_args(Denominator)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_only_a_loss_that_clips_has_bounds_and_their_metrics(loss: type[Loss]) -> None:
    bounds = type(implementation(loss())).ratio_bounds
    assert (bounds is not PolicyLoss.ratio_bounds) == loss.clips_ratio
    _, metrics = objective(TrainSpec().model_copy(update={"loss": loss()}), tokens_of([0.5, 2.0], [0, 1]))
    counted = {"policy/clip_low", "policy/clip_high"} & set(metrics.result())
    assert counted == ({"policy/clip_low", "policy/clip_high"} if loss.clips_ratio else set())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_ratio_is_taken_at_the_declared_level(loss: type[Loss]) -> None:
    """A token's loss depends on another token of its row exactly where the level is the sequence."""
    formula = implementation(loss())

    def losses(second: float) -> Tensor:
        tokens = tokens_of([1.0001, second], [0, 0])
        return formula.token_losses(tokens, loss_ratio(loss(), tokens)).detach()

    moved = losses(1.0)[0] != losses(1.0002)[0]
    assert bool(moved) == (loss.ratio_level == "sequence")


class LinearLoss(Loss):
    """A loss of a test's own: -r A, per episode."""

    formula: ClassVar[str] = f"{__name__}:Linear"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "token"
    clips_ratio: ClassVar[bool] = False
    denominator: ClassVar[Denominator] = "episodes"


class Linear(PolicyLoss[LinearLoss]):
    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        return -ratio * tokens.advantages


def test_a_loss_that_declares_its_facts_needs_no_other_change() -> None:
    spec = TrainSpec().model_copy(update={"loss": LinearLoss()})
    tokens = tokens_of([0.5, 2.0], [0, 1])
    value, metrics = objective(spec, tokens)
    assert value.item() == pytest.approx(0.5 - 2.0, abs=1e-15)
    assert "policy/clip_low" not in metrics.result()
    found = token_loss_weights(LinearLoss(), [1, 2, 1], ["a", "a", "b"])
    assert np.concatenate(found).tolist() == [0.5] * 4
