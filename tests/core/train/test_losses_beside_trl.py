"""The losses beside those of `trl`'s GRPOTrainer, on the same numbers: value and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from engine.schemas.loss import LossSpec
from engine.schemas.train import KlSpec, RolloutCorrectionSpec, TrainSpec
from engine.train.loss_columns import token_loss_weights
from engine.train.loss_tokens import LossTokens
from engine.train.losses import objective

pytestmark = pytest.mark.slow  # importing trl takes seconds

LENGTHS = [5, 2, 7, 4]
WIDTH = max(LENGTHS)


def padded(seed: int, scale: float) -> torch.Tensor:
    return torch.randn(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
OLD = -2 + padded(0, 0.5)
NEW = OLD + padded(1, 0.4)
REFERENCE = OLD + padded(2, 0.3)
BY_TOKEN = padded(3, 1.0)
BY_ROW = padded(4, 1.0)[:, :1].expand(-1, WIDTH).contiguous()


def theirs(
    kind: str, logprobs: torch.Tensor, advantages: torch.Tensor, *, beta: float, delta: float | None
) -> torch.Tensor:
    """`_compute_loss` as it is, of a trainer that has just what that reads; the model's answer is given to it."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    trainer = object.__new__(trl.GRPOTrainer)
    settings: dict[str, Any] = {
        "loss_type": {"gspo": "grpo", "ppo": "dapo"}.get(kind, kind),
        "importance_sampling_level": "sequence" if kind == "gspo" else "token",
        "epsilon_low": 0.2,
        "epsilon_high": 1.5 if kind == "cispo" else 0.28,
        "beta": beta,
        "args": SimpleNamespace(
            delta=delta,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.25,  # exact in float32, which it becomes there
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True),
        "max_completion_length": 16,
        "current_gradient_accumulation_steps": 1,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
    }
    vars(trainer).update(settings)
    nothing = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    found: torch.Tensor = trainer._compute_loss(
        None,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64),
            "completion_mask": MASK.to(torch.int64),
            "advantages": advantages,
            "old_per_token_logps": OLD,
            "ref_per_token_logps": REFERENCE,
            "num_items_in_batch": MASK.sum(),
        },
    )
    return found


def ours(
    kind: str, logprobs: torch.Tensor, advantages: torch.Tensor, *, beta: float, delta: float | None
) -> torch.Tensor:
    options: dict[str, Any] = {"kind": kind}
    if kind == "cispo":
        options["clip_high"] = 0.5
    elif kind == "sapo":
        options["temperature_negative"] = 1.25
    else:
        options |= {"clip_low": 0.2, "clip_high": 0.28, "delta": delta}
    loss: LossSpec = TypeAdapter(LossSpec).validate_python(options)
    loss_weights = np.concatenate(token_loss_weights(loss, LENGTHS, list("abcd"), length=16))
    rows = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[MASK]
    tokens = LossTokens(
        logprobs=logprobs[MASK],
        proximal=OLD[MASK],
        sampler=OLD[MASK],
        advantages=advantages[MASK],
        loss_weights=torch.tensor(loss_weights),
        rows=rows,
        turns=rows,
        reference=REFERENCE[MASK],
    )
    spec = TrainSpec(loss=loss, rollout_correction=RolloutCorrectionSpec(kind="none"), kl=KlSpec(coefficient=beta))
    return objective(spec, tokens)[0]


@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("kind", "advantages"),
    [
        *((kind, BY_TOKEN) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "ppo", "cispo", "sapo")),
        ("gspo", BY_ROW),
    ],
)
def test_value_and_gradient(kind: str, advantages: torch.Tensor, beta: float, delta: float | None) -> None:
    found = []
    for make in (ours, theirs):
        logprobs = NEW.clone().requires_grad_()
        loss = make(kind, logprobs, advantages, beta=beta, delta=delta)
        found.append((loss.detach(), torch.autograd.grad(loss, logprobs)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-14)
