"""slime's samples of an episode, its converter and advantage function, and the sums that are compared on both sides of
each.

`convert` runs in slime's rollout manager, `advantages` in each process of the training, possibly on another machine.
slime forwards a fixed list of columns; `rewards` holds the advantages of each row, and `prompt`, which slime forwards
and never fills, the sums.

Invariant: a batch is trained on only if its tokens, trained tokens and sum of absolute advantages are those of the
engine's rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow, final_rows

if TYPE_CHECKING:
    from engine.schemas.trajectory import Branch, Trajectory
    from engine.tokens.vision import Vision

_CHANGES = "a hook of slime that changes or drops samples or columns"


KEY = "engine"
"""The key of `Sample.metadata` that holds an `SampleOrigin`."""


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample comes from. It is saved with `--save-debug-rollout-data`, so saved samples can be converted
    too."""

    trajectory: Trajectory | None
    """The episode; None if the engine itself failed in it."""
    branch: int = 0
    """The row of the episode; -1 for an episode without a row to train on."""
    start: int = 0
    """The first token of the response: the first trained one."""


def origin_of(sample: Any) -> SampleOrigin | None:
    """The origin of a sample; None if another function made it."""
    origin = (sample.metadata or {}).get(KEY)
    return origin if isinstance(origin, SampleOrigin) else None


def samples_of(
    sample: Any, trajectory: Trajectory | None, decode: Callable[[Sequence[int]], str], vision: Vision | None
) -> list[Any]:
    """The samples of one episode.

    Siblings share `rollout_id`, so slime's loss counts the episode once. An episode that cannot be trained on has one
    sample without trained tokens (`remove_sample`), because slime needs one for each rollout.

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
    sample.metadata = (sample.metadata or {}) | {KEY: SampleOrigin(trajectory, -1, 1)}
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
    made.weight_versions = [str(version) for version in dict.fromkeys(branch.weight_versions[trained].tolist())]
    made.reward = trajectory.outcome.reward
    statuses = type(sample).Status
    cut = trajectory.outcome.limit is not None or trajectory.turns[-1].finish.type == "length"
    made.status = statuses.TRUNCATED if cut else statuses.COMPLETED
    made.metadata = (sample.metadata or {}) | {KEY: SampleOrigin(trajectory, branch.index, start)}
    if vision is not None and branch.images:
        tensors = vision.tensors([[image.image for image in branch.images]])
        made.multimodal_train_inputs = {name: torch.from_numpy(value.copy()) for name, value in tensors.items()}
    if branch.routed_experts is not None:
        made.rollout_routed_experts = torch.from_numpy(np.array(branch.routed_experts))
    return made


def convert(args: Any, samples: Sequence[Any]) -> dict[str, list[Any]]:
    """Make slime's training data of samples: `--custom-convert-samples-to-train-data-path`.

    The advantages are computed here, because only here all episodes of a group are at hand.

    Args:
        args: slime's arguments, with `engine_spec` and `global_batch_size`.
        samples: All samples of the rollout, flat.

    Returns:
        Columns of slime's list, one entry for each sample. `rewards`: the engine's advantages, float32 tensors
        [response].

    Raises:
        TrainError: kind `handover`: a sample was not made by the engine's functions, a row of an episode is missing,
            `global_batch_size` does not divide the number of episodes, or the columns differ from those of the engine.
        SpecError: the spec is invalid.
    """
    rows = _rows(args, samples)
    data: dict[str, list[Any]] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [torch.from_numpy(row.advantages.copy()) for row in rows],
        "raw_reward": [float(sample.reward) for sample in samples],
        "truncated": [int(sample.status == type(sample).Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples],
        "loss_masks": [row.mask for row in rows],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "source_names": [(sample.metadata or {}).get("source_name", "unknown") for sample in samples],
    }
    masked: Counter[Any] = Counter()
    for number, mask in zip(data["rollout_ids"], data["loss_masks"], strict=True):
        masked[number] += sum(mask)
    data["rollout_mask_sums"] = [masked[number] for number in data["rollout_ids"]]
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if getattr(args, "use_rollout_routing_replay", False):
        data["rollout_routed_experts"] = [_experts(sample) for sample in samples]
    size = getattr(args, "global_batch_size", None)
    if size and len(masked) % size:
        raise TrainError(
            f"slime would drop {len(masked) % size} of {len(masked)} episodes: their number is not a multiple of "
            f"--global-batch-size {size}",
            kind="handover",
        )
    per_row = [
        _sums(tokens, mask, advantages)
        for tokens, mask, advantages in zip(data["tokens"], data["loss_masks"], data["rewards"], strict=True)
    ]
    total = BatchSums.total(per_row)
    BatchSums.of_rows([row for row in rows if any(row.mask)]).check(total, "slime", _CHANGES)
    totals = [float(total.tokens), float(total.trained), total.advantages]
    data["prompt"] = [[float(row.tokens), float(row.trained), row.advantages, *totals] for row in per_row]
    return data


def _rows(args: Any, samples: Sequence[Any]) -> list[HandedRow]:
    """The engine's row of each sample, built from the episodes; without trained tokens if the sample is not trained.

    Groups with fewer trainable episodes than `train.min_group` are not trained.
    """
    from engine.plugins.trainers.slime.settings import Settings
    from engine.schemas.train import TrainSpec
    from engine.spec.load import load_spec
    from engine.train.batches import GroupBuilder

    loaded = load_spec(Settings.read(args).spec)
    train = loaded.spec.train or TrainSpec()
    origins = [origin_of(sample) for sample in samples]
    foreign = [sample.index for sample, origin in zip(samples, origins, strict=True) if origin is None]
    if foreign:
        raise TrainError(
            f"samples {foreign[:8]} of slime's batch were not made by the engine's generate or rollout function, so "
            "they have no advantages",
            kind="handover",
        )
    groups: dict[str, dict[str, Any]] = {}
    for origin in origins:
        if origin is not None and (ended := origin.trajectory) is not None:
            groups.setdefault(ended.task_id, {})[ended.episode_id] = ended
    builder = GroupBuilder(loaded.spec, train, loaded.base)
    samples_per_task = loaded.spec.rollout.samples_per_task
    members = [list(group.values()) for group in groups.values()]
    rows = [row for group in members if not builder.is_small(group, samples_per_task) for row in builder.rows(group)]
    made = {(row.episode.episode_id, row.branch.index): HandedRow.of(row) for row in final_rows(rows, train)}
    rows_of_samples: list[HandedRow] = []
    for sample, origin in zip(samples, origins, strict=True):
        assert origin is not None
        ended = origin.trajectory
        row = None if ended is None else made.pop((ended.episode_id, origin.branch), None)
        if row is None or sample.remove_sample:
            size = sample.response_length
            rows_of_samples.append(HandedRow([], [], [0] * size, [0.0] * size, np.zeros(size, np.float32)))
            continue
        if sample.tokens != [*row.prompt_ids, *row.completion_ids]:
            raise TrainError(
                f"sample {sample.index} has other tokens than row {origin.branch} of its episode; remove the hook that "
                "changes samples",
                kind="handover",
            )
        rows_of_samples.append(_from(row, origin.start))
    if made:
        episode, branch = next(iter(made))
        raise TrainError(
            f"{len(made)} rows have no sample in slime's batch, the first is row {branch} of {episode}; remove the "
            "hook that drops samples",
            kind="handover",
        )
    return rows_of_samples


def _from(row: HandedRow, start: int) -> HandedRow:
    """The row with a completion that begins at `start`, which is before its first trained token if a part of the row is
    masked."""
    front = row.prompt_ids[start:]
    if not front:
        return row
    zeros = [0] * len(front)
    return HandedRow(
        row.prompt_ids[:start],
        [*front, *row.completion_ids],
        [*zeros, *row.mask],
        [*map(float, zeros), *row.logprobs],
        np.concatenate([np.zeros(len(front), np.float32), row.advantages]),
        row.images,
    )


def _sums(tokens: Any, mask: Any, advantages: torch.Tensor) -> BatchSums:
    """The sums of one row as slime has it; rows without trained tokens count nothing."""
    trained = torch.as_tensor(mask, device="cpu")
    return BatchSums.of_tensors(len(tokens), trained, advantages.cpu()) if trained.any() else BatchSums(0, 0, 0.0)


def _experts(sample: Any) -> Any:
    experts = sample.rollout_routed_experts
    if experts is None or len(experts) != len(sample.tokens) - 1:
        raise TrainError(
            f"--use-rollout-routing-replay needs the experts of {len(sample.tokens) - 1} tokens of sample "
            f"{sample.index}, and it has "
            f"{0 if experts is None else len(experts)}; set `backend.routed_experts`, or remove the flag",
            kind="handover",
        )
    return experts


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns` to the engine's: slime's `--custom-advantage-function-path`.

    With context parallelism each process gets its part. slime calls this on the last pipeline stage only.

    Args:
        args: slime's arguments.
        rollout_data: The rows of this process, as slime's `_get_rollout_data` has them.

    Raises:
        TrainError: kind `handover`: `convert` did not make the rows, or a row or the whole batch lost something on the
            way.
    """
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    sums_of_rows = rollout_data.pop("prompt", None)
    rewards, masks = rollout_data["rewards"], rollout_data["loss_masks"]
    if sums_of_rows is None or not all(
        isinstance(row_rewards, torch.Tensor) and row_rewards.dim() == 1 for row_rewards in rewards
    ):
        raise TrainError(
            "the rewards of slime's batch are not the engine's advantages by token; use "
            "--custom-convert-samples-to-train-data-path engine.plugins.trainers.slime.convert",
            kind="handover",
        )
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    parts = []
    here, sliced = torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for at, (values, mask, (total, response)) in enumerate(zip(rewards, masks, lengths, strict=True)):
        if len(values) != response or len(mask) != response or len(rollout_data["tokens"][at]) != total:
            raise TrainError(
                f"row {at} of slime's batch has {len(values)} advantages, {len(mask)} masks and "
                f"{len(rollout_data['tokens'][at])} tokens for "
                f"a response of {response} in {total} tokens",
                kind="handover",
            )
        tokens, trained, size = sums_of_rows[at][:3]
        actual = _sums(rollout_data["tokens"][at], mask, values)
        BatchSums(int(tokens), int(trained), size).check(actual, "slime", _CHANGES)
        here += torch.tensor([actual.tokens, actual.trained, actual.advantages], dtype=torch.float64)
        part = slice_log_prob_with_cp(values.to(mask.device, torch.float32), total, response)
        parts.append(part)
        sliced += (part.cpu().double().abs() * slice_log_prob_with_cp(mask, total, response).cpu()).sum()
    if parts:
        device = masks[0].device
        tokens, trained, size = sums_of_rows[0][3:]
        ranks = _added(here.to(device), mpu, with_context_parallel=False)
        slices = _added(sliced.to(device), mpu, with_context_parallel=True)
        handed = BatchSums(int(tokens), int(trained), size)
        handed.check(BatchSums(int(ranks[0]), int(ranks[1]), float(ranks[2])), "slime", _CHANGES)
        by_slices = BatchSums(int(tokens), int(trained), float(slices[0]))
        handed.check(by_slices, "slime", "slicing with context parallelism")
    rollout_data["advantages"] = parts
    rollout_data["returns"] = list(parts)


def _added(value: torch.Tensor, mpu: Any, *, with_context_parallel: bool) -> torch.Tensor:
    """The sum over the processes that hold the batch."""
    if mpu.get_data_parallel_world_size(with_context_parallel=with_context_parallel) > 1:
        torch.distributed.all_reduce(
            value, group=mpu.get_data_parallel_group(with_context_parallel=with_context_parallel)
        )
    return value
