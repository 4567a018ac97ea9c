"""SkyRL's GeneratorOutput with the engine's advantages, the estimator that returns them, and the sums of SkyRL's batch.

SkyRL has no column for advantages by token. Its rewards by token are handed over instead, and a registered estimator
returns them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow
from engine.plugins.trainers.library import imports_of
from engine.plugins.trainers.pixels import checksums_of, row_sum

if TYPE_CHECKING:
    import torch

    from engine.plugins.trainers.pixels import Pixels

ESTIMATOR = "engine"
"""The value of `trainer.algorithm.advantage_estimator`."""


def identity_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards by token as advantages and as returns. SkyRL calls this as its advantage estimator.

    Args:
        token_level_rewards: The engine's advantages; 0.0 on observations, float32 [rows, response].
        response_mask: 1 on the tokens of responses, observations too, [rows, response].
    """
    advantages = token_level_rewards * response_mask
    return advantages, advantages.clone()


def register_estimator() -> None:
    """Register `identity_advantages` in this process under the name `ESTIMATOR`. Later calls do nothing.

    Raises:
        TrainError: kind `train_setup`: SkyRL cannot be imported.
    """
    with imports_of("skyrl"):
        from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
    if ESTIMATOR not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(ESTIMATOR, identity_advantages)


def filled(rows: Sequence[HandedRow]) -> list[HandedRow]:
    """The rows, with an untrained copy of a row with images for each episode that is not trained on.

    SkyRL's model takes no micro-batch without patches.

    Raises:
        TrainError: kind `handover`: some trained rows have images and others have none.
    """
    shown = next((row for row in rows if row.images), None)
    if shown is None:
        return list(rows)
    trained = [row for row in rows if any(row.mask)]
    if blind := sum(not row.images for row in trained):
        raise TrainError(
            f"{blind} of {len(trained)} trained rows have no image: SkyRL's model takes no micro-batch "
            "without patches beside others with them; show an image in each episode or in none, or use `engine train`",
            kind="handover",
        )
    size = len(shown.completion_ids)
    copy = replace(shown, mask=[0] * size, logprobs=[0.0] * size, advantages=np.zeros(size, np.float32))
    return [row if row.images else copy for row in rows]


def generator_output(
    rows: Sequence[HandedRow], metrics: Mapping[str, float] | None = None, pixels: Pixels | None = None
) -> dict[str, Any]:
    """Make SkyRL's `GeneratorOutput`: one row for each prompt, in the order of the prompts.

    Args:
        rows: The rows; `HandedRow.empty` where an episode is not trained on.
        metrics: Figures for `rollout_metrics`, such as the mean reward. SkyRL's own `reward/avg_raw_reward` and
            `reward/avg_pass_at_n` are computed from advantages and say nothing about rewards.
        pixels: What makes the images of rows, if the model takes images. Rows with the same ones share their tensors.
    """
    output: dict[str, Any] = {
        "prompt_token_ids": [row.prompt_ids for row in rows],
        "response_ids": [row.completion_ids for row in rows],
        "rewards": [row.advantages.tolist() for row in rows],
        "loss_masks": [row.mask for row in rows],
        "stop_reasons": None,
        "rollout_metrics": dict(metrics or {}),
        "rollout_logprobs": [row.logprobs for row in rows],
    }
    if any(row.experts is not None for row in rows):
        output["rollout_expert_indices"] = [[] if row.experts is None else row.experts.tolist() for row in rows]
    if pixels is not None and any(row.images for row in rows):
        images = [pixels.row([*row.prompt_ids, *row.completion_ids], row.images) for row in rows]
        tensors = {
            of_row.digests: dict(of_row.items()) for of_row in {of_row.digests: of_row for of_row in images}.values()
        }
        output |= {name: [tensors[row.images][name] for row in rows] for name in images[0]}
    return output


def sums_of_batch(batch: Any) -> BatchSums:
    """The sums of SkyRL's `TrainingInputBatch` with `advantages`. Rows that SkyRL added as padding are not counted."""
    rows = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
    tokens = batch["attention_mask"][:rows].bool()
    images = 0
    if batch.get("pixel_values") is not None:
        for place, there in enumerate(tokens):
            checksums = checksums_of({name: batch[name][place] for name in ("pixel_values", "image_grid_thw")})
            images += row_sum(batch["sequences"][place][there], checksums)
    return BatchSums.of_tensors(int(tokens.sum()), batch["loss_mask"][:rows], batch["advantages"][:rows], images)
