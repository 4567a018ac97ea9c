"""slime's samples of an episode: one for each row, with the row's own ids, masks and log-probs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.schemas.trajectory import Branch, Trajectory
    from engine.tokens.vision import Vision

KEY = "engine"
"""The key of `Sample.metadata` that holds an `Origin`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample comes from. It is saved with `--save-debug-rollout-data`, so saved samples can be converted too."""

    trajectory: Trajectory | None
    """The episode; None if the engine itself failed in it."""
    branch: int = 0
    """The row of the episode; -1 for an episode without a row to train on."""
    start: int = 0
    """The first token of the response: the first trained one."""


def origin_of(sample: Any) -> Origin | None:
    """The origin of a sample; None if another function made it."""
    found = (sample.metadata or {}).get(KEY)
    return found if isinstance(found, Origin) else None


def samples_of(
    sample: Any, trajectory: Trajectory | None, decode: Callable[[Sequence[int]], str], vision: Vision | None
) -> list[Any]:
    """The samples of one episode.

    Siblings share `rollout_id`, so slime's loss counts the episode once. An episode that cannot be trained on has one sample without
    trained tokens (`remove_sample`), because slime needs one for each rollout.

    Args:
        sample: slime's sample, which gives index, group and label.
        trajectory: The episode; None if the engine itself failed in it.
        decode: Decodes ids, for `Sample.response`.
        vision: The image processing of a model with a vision tower.
    """
    made = copy.copy(sample)
    made.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    branches = [] if trajectory is None else [branch for branch in trajectory.branches if branch.loss_mask.any()]
    if trajectory is None or not trajectory.outcome.trainable or not branches:
        return [_untrained(made, trajectory)]
    return [_sample(made, trajectory, branch, decode, vision) for branch in branches]


def _untrained(sample: Any, trajectory: Trajectory | None) -> Any:
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [0], [0.0], []
    sample.reward = 0.0 if trajectory is None else trajectory.outcome.reward
    sample.remove_sample = True
    sample.status = type(sample).Status.FAILED
    sample.metadata = (sample.metadata or {}) | {KEY: Origin(trajectory, -1, 1)}
    return sample


def _sample(
    sample: Any, trajectory: Trajectory, branch: Branch, decode: Callable[[Sequence[int]], str], vision: Vision | None
) -> Any:
    made = copy.copy(sample)
    trained = branch.loss_mask == 1
    start = int(trained.argmax())
    made.tokens = branch.input_ids.tolist()
    made.response_length = len(made.tokens) - start
    made.response = decode(made.tokens[start:])
    made.loss_mask = branch.loss_mask[start:].astype(int).tolist()
    made.rollout_log_probs = np.where(trained, branch.logprobs, 0.0)[start:].tolist()
    made.weight_versions = [str(each) for each in dict.fromkeys(branch.weight_versions[trained].tolist())]
    made.reward = trajectory.outcome.reward
    statuses = type(sample).Status
    cut = trajectory.outcome.limit is not None or trajectory.turns[-1].finish.type == "length"
    made.status = statuses.TRUNCATED if cut else statuses.COMPLETED
    made.metadata = (sample.metadata or {}) | {KEY: Origin(trajectory, branch.index, start)}
    if vision is not None and branch.images:
        tensors = vision.tensors([[image.image for image in branch.images]])
        made.multimodal_train_inputs = {name: torch.from_numpy(value.copy()) for name, value in tensors.items()}
    if branch.routed_experts is not None:
        made.rollout_routed_experts = torch.from_numpy(np.array(branch.routed_experts))
    return made
