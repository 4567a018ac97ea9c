"""SkyRL's GeneratorOutput with the engine's advantages, the estimator that returns them, and the sums of SkyRL's batch.

SkyRL has no column for advantages by token. Its rewards by token are handed over instead, and a registered estimator returns them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.integrations.trainers.handover import HandedRow, Sums
from engine.integrations.trainers.library import imports_of

if TYPE_CHECKING:
    import torch

    from engine.tokens.vision import Vision

ESTIMATOR = "engine"
"""The value of `trainer.algorithm.advantage_estimator`."""
_IMAGE_TENSORS = {"pixel_values", "image_grid_thw"}


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
    with imports_of("SkyRL", "'episode-engine[skyrl]'"):
        from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
    if ESTIMATOR not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(ESTIMATOR, identity_advantages)


def generator_output(
    rows: Sequence[HandedRow], metrics: Mapping[str, float] | None = None, vision: Vision | None = None
) -> dict[str, Any]:
    """Make SkyRL's `GeneratorOutput`: one row for each prompt, in the order of the prompts.

    Args:
        rows: The rows; `HandedRow.empty` where an episode is not trained on.
        metrics: Figures for `rollout_metrics`, such as the mean reward. SkyRL's own `reward/avg_raw_reward` and `reward/avg_pass_at_n` are computed
            from advantages and say nothing about rewards.
        vision: The model's image processing, if the rows may have images.

    Raises:
        TrainError: kind `train_setup`: SkyRL does not take this family's image tensors.
    """
    found: dict[str, Any] = {
        "prompt_token_ids": [row.prompt_ids for row in rows],
        "response_ids": [row.completion_ids for row in rows],
        "rewards": [row.advantages.tolist() for row in rows],
        "loss_masks": [row.mask for row in rows],
        "stop_reasons": None,
        "rollout_metrics": dict(metrics or {}),
        "rollout_logprobs": [row.logprobs for row in rows],
    }
    if vision is not None and any(row.images for row in rows):
        found |= _images(rows, vision)
    return found


def _images(rows: Sequence[HandedRow], vision: Vision) -> dict[str, list[Any]]:
    """The image tensors of each row; tensors without images for a row that has none."""
    import torch

    each = [vision.tensors([row.images]) for row in rows]
    first = next(tensors for tensors in each if tensors)
    if set(first) != _IMAGE_TENSORS:
        raise TrainError(
            f"SkyRL takes {' and '.join(sorted(_IMAGE_TENSORS))}; this model has {', '.join(sorted(first))}; use `engine train`",
            kind="train_setup",
        )
    empty = {name: np.zeros((0, *array.shape[1:]), array.dtype) for name, array in first.items()}
    return {
        name: [torch.from_numpy(np.ascontiguousarray((tensors or empty)[name])) for tensors in each] for name in first
    }


def sums_of_batch(batch: Any) -> Sums:
    """The sums of SkyRL's training batch, after its advantages were computed. Rows that SkyRL added as padding are not counted.

    Args:
        batch: SkyRL's `TrainingInputBatch`, with `advantages`.
    """
    rows = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
    mask = batch["loss_mask"][:rows]
    return Sums(
        int(batch["attention_mask"][:rows].sum()),
        int(mask.sum()),
        float((batch["advantages"][:rows].double().abs() * mask).sum()),
    )
