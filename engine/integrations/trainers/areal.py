"""The engine's rows in AReaL's trainer: what a `RolloutWorkflow` returns, and the settings under which the advantages arrive.

    refuse_settings(config, loaded)
    trajectory(rows, advantages, rewards, actor=config.actor)     # the rows of one group, one episode may have several
    handed.check(sums_of_batch(batch), "AReaL", …)                # after PPOActor.compute_advantages

AReaL computes `advantages = rewards − values` if `actor.discount` is 0 and there is no critic, so the column `values` holds the negative advantages.
AReaL places the reward of a row at its last token, so the value there is the reward minus the advantage, and the column `rewards` keeps the
true reward for AReaL's logs. Written for AReaL 1.0.4; nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import TrainError
from engine.integrations.trainers.handover import Sums

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.store.export import Row
    from engine.tokens.vision import Vision


def refuse_settings(config: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of AReaL that would change the engine's advantages, or that have no effect on the engine's episodes.

    Args:
        config: AReaL's `GRPOConfig` or `PPOConfig`.
        loaded: The spec.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    actor, sampling = config.actor, config.gconfig
    temperature = loaded.spec.sampling.temperature
    problems = {
        f"actor.discount: {actor.discount:g}; set it to 0": actor.discount != 0,
        f"actor.kl_ctl: {actor.kl_ctl:g}; set it to 0": actor.kl_ctl != 0,
        "actor.reward_norm: set it to null; the engine's credit has the baseline": actor.reward_norm is not None,
        "actor.adv_norm: set it to null, or use `train.advantage_norm: batch`": actor.adv_norm is not None,
        "actor.overlong_reward_penalty: use `train.overlong`": actor.overlong_reward_penalty,
        "actor.mask_no_eos_with_zero: it would take the reward from the last token of the longest rows": actor.mask_no_eos_with_zero,
        "critic: it would overwrite the column `values`": getattr(config, "critic", None) is not None,
        f"gconfig.n_samples: {sampling.n_samples}; set it to 1, the engine runs the {loaded.spec.rollout.samples_per_task} episodes of a group": sampling.n_samples
        != 1,
        f"actor.temperature: {actor.temperature:g}; the spec samples with {temperature:g}": actor.temperature
        != temperature,
    }
    named = [text for text, refused in problems.items() if refused]
    if named:
        raise TrainError(f"{loaded.path}: change these settings of AReaL: " + "; ".join(named), kind="train_setup")


def trajectory(
    rows: Sequence[Row],
    advantages: Sequence[np.ndarray],
    rewards: Sequence[float],
    *,
    actor: Any,
    vision: Vision | None = None,
) -> dict[str, Any]:
    """Make what `RolloutWorkflow.arun_episode` returns: the rows as tensors, padded on the right.

    Args:
        rows: The rows.
        advantages: Their advantages, float32 [tokens] each.
        rewards: The reward of each row's episode, for AReaL's logs.
        actor: AReaL's `PPOActorConfig`; `reward_bias`, `reward_scaling` and `reward_clip` change the reward that AReaL places.
        vision: The model's image processing, if it takes images. Then every trajectory has `multi_modal_input` and `mm_token_type_ids`, because
            AReaL needs the same keys in all.

    Returns:
        `input_ids` int32, `attention_mask` bool, `loss_mask` int32, `logprobs` float32, `versions` int32 (-1 on tokens that were not sampled) and
        `values` float32, all [rows, tokens]; `rewards` float32 [rows].
    """
    size = max(len(row["input_ids"]) for row in rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    trained = [row["loss_mask"] == 1 for row in rows]
    values = _padded([-np.where(mask, of, 0.0) for mask, of in zip(trained, advantages, strict=True)], size, 0.0)
    values = torch.roll(values, -1, 1)  # position t holds what is of token t + 1
    given = torch.tensor(list(rewards), dtype=torch.float32)
    placed = torch.clip(
        (given + actor.reward_bias) * actor.reward_scaling, max=actor.reward_clip, min=-actor.reward_clip
    )
    values[torch.arange(len(rows)), torch.clip(lengths - 2, min=0)] += placed
    found: dict[str, Any] = {
        "input_ids": _padded([row["input_ids"] for row in rows], size, 0).int(),
        "attention_mask": torch.arange(size)[None] < lengths[:, None],
        "loss_mask": _padded(trained, size, 0).int(),
        "logprobs": _padded([np.where(mask, row["logprobs"], 0.0) for mask, row in zip(trained, rows, strict=True)], size, 0.0),
        "versions": _padded([row["weight_versions"] for row in rows], size, -1).int(),
        "values": values,
        "rewards": given,
    }  # fmt: skip
    if vision is not None:
        ids = found["input_ids"].tolist()
        found["multi_modal_input"] = [_tensors(row, vision) for row in rows]
        found["mm_token_type_ids"] = torch.tensor(vision.token_types(ids))
    return found


def _padded(rows: Sequence[np.ndarray], size: int, fill: float) -> torch.Tensor:
    """float32 [rows, size]; `fill` on padding. Ids up to 2**24 are exact."""
    found = np.full((len(rows), size), fill, np.float32)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return torch.from_numpy(found)


def _tensors(row: Row, vision: Vision) -> dict[str, torch.Tensor]:
    """The image tensors of a row; none if it has no image."""
    tensors = vision.tensors([[image["image"] for image in row["images"]]])
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}


def sums_of_batch(batch: Mapping[str, torch.Tensor]) -> Sums:
    """The sums of AReaL's batch.

    Args:
        batch: What `PPOActor.compute_advantages` returns; its `loss_mask` and `advantages` are one token to the left of `input_ids`.
    """
    mask = batch["loss_mask"]
    return Sums(
        int(batch["attention_mask"].sum()), int(mask.sum()), float((batch["advantages"].double().abs() * mask).sum())
    )
