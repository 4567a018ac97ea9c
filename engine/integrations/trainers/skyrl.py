"""The engine's rows in SkyRL's trainer: its GeneratorOutput with our advantages, its settings, and the sums of its batch.

    register_estimator()
    refuse_settings(cfg, loaded)
    output = generator_output(rows, advantages)      # what GeneratorInterface.generate returns
    sums.check(sums_of_batch(batch), "SkyRL", …)     # after compute_advantages_and_returns

SkyRL has no column for advantages by token. Its rewards by token are handed over instead, and a registered estimator returns them unchanged.
Written for SkyRL 0.3.0. SkyRL is imported by `register_estimator` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.integrations.trainers.handover import HandedRow, Sums

if TYPE_CHECKING:
    import torch

    from engine.spec.load import LoadedSpec
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
    try:
        from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
    except ImportError as error:
        raise TrainError(f"SkyRL cannot be imported ({error}); pip install skyrl==0.3.0", kind="train_setup") from error
    if ESTIMATOR not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(ESTIMATOR, identity_advantages)


def refuse_settings(cfg: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of SkyRL that would change the engine's advantages, or that have no effect on the engine's episodes.

    Args:
        cfg: SkyRL's `SkyRLTrainConfig`.
        loaded: The spec.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    trainer, generator = cfg.trainer, cfg.generator
    algorithm = trainer.algorithm
    temperature = loaded.spec.sampling.temperature
    problems = {
        f"trainer.algorithm.advantage_estimator: {algorithm.advantage_estimator}; set it to {ESTIMATOR}": algorithm.advantage_estimator
        != ESTIMATOR,
        "trainer.algorithm.use_kl_in_reward: it would be subtracted from the advantages": algorithm.use_kl_in_reward,
        "trainer.algorithm.advantage_batch_normalize: use `train.advantage_norm: batch`": algorithm.advantage_batch_normalize,
        "trainer.algorithm.zero_variance_filter: SkyRL ignores it with rewards by token": algorithm.zero_variance_filter,
        "trainer.algorithm.dynamic_sampling.type: it would compare sums of advantages": algorithm.dynamic_sampling.type
        is not None,
        "trainer.critic.model.path: the engine's advantages have no critic": trainer.critic.model.path is not None,
        "trainer.fully_async.enabled: rows have no weight versions there": trainer.fully_async.enabled,
        "generator.step_wise_trajectories: all rows of an episode would get the advantage of the last one": generator.step_wise_trajectories,
        "generator.apply_overlong_filtering: use `train.overlong: mask`": generator.apply_overlong_filtering,
        f"generator.sampling_params.temperature: {generator.sampling_params.temperature:g}; the spec samples with {temperature:g}": generator.sampling_params.temperature
        != temperature,
        f"trainer.algorithm.temperature: {algorithm.temperature}; the spec samples with {temperature:g}": algorithm.temperature
        not in (None, temperature),
    }
    named = [text for text, refused in problems.items() if refused]
    if named:
        raise TrainError(f"{loaded.path}: change these settings of SkyRL: " + "; ".join(named), kind="train_setup")


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
