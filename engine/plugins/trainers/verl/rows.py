"""Rows of TransferQueue with the engine's advantages, and the sums of a group that each of its rows carries as tags.

Invariants:
- All rows have the same columns, because verl keeps the columns of the first row and drops the others.
- TransferQueue holds the pixels of an image once for each group: in the first row that shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow, images_of
from engine.plugins.trainers.pixels import Pixels, checksums_of, row_sum
from engine.plugins.trainers.verl import fixes
from engine.tokens.image_bank import RecentlyUsed
from engine.tokens.vision_families import PreparedImage

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory
    from engine.store.rows.row import TrainingRow

COLUMN = "engine_advantages"
"""The column of the advantages, float32 [response]."""
TAGS = ("engine_tokens", "engine_trained", "engine_advantage")
"""The tags of a row that hold the sums of its group."""
IMAGES = "engine_images"
"""The tag of a row that holds the sum over its own images."""
CHANGES = "a sampler, a filter or a rollout correction that drops rows or tokens"
_FETCHED: RecentlyUsed[PreparedImage] = RecentlyUsed(1 << 30)
"""Pixels of other rows, in a process that trains."""


class QueuedImages(dict[str, PreparedImage]):
    """The scaled pixels that a row in TransferQueue holds, by digest. Those that another row of its group holds are
    read from there."""

    def __init__(self, images: Mapping[str, PreparedImage], key: str, holders: dict[str, str]) -> None:
        """`key`: the row's; `holders`: by digest, the key of the row that holds an image; may be extended here."""
        self.holders = {digest: holders.setdefault(digest, key) for digest in images}
        super().__init__({digest: image for digest, image in images.items() if self.holders[digest] == key})

    def __getitem__(self, digest: str) -> PreparedImage:
        fixes.check_applied()
        image = self.get(digest) or _FETCHED.get(digest)
        if image is None:
            import transfer_queue

            name, keys = "multi_modal_inputs", [self.holders[digest]]
            holder = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=[name])[name][0]
            image = getattr(holder, "data", holder).images[digest]
            _FETCHED.put(digest, image, image.nbytes)
        return image


def group_rows(
    uid: str,
    step: int,
    rows: Sequence[TrainingRow],
    trajectories: Mapping[str, Trajectory],
    columns: Mapping[str, Any],
    pixels: Pixels | None = None,
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a group as verl's trainer reads them: keys `{uid}_{sample}_{index}`, columns and tags of each.

    `trajectories`: the episodes by id; `columns`: those of verl's data set.
    """
    handed = list(map(HandedRow.of, rows))
    sums = BatchSums.of_rows(handed)
    totals = dict(zip(TAGS, (sums.tokens, sums.trained, sums.advantages), strict=True))
    names = sorted({name for trajectory in trajectories.values() for name in trajectory.outcome.rewards})
    keys, fields, tags = [], [], []
    branches: dict[int, int] = {}
    holders: dict[str, str] = {}
    for row, handed_row in zip(rows, handed, strict=True):
        sample = row.episode.sample_index
        index = branches.get(sample, 0)
        branches[sample] = index + 1
        oldest, newest = versions_of_row(row)
        trajectory = trajectories[row.episode.episode_id]
        keys.append(f"{uid}_{sample}_{index}")
        images = image_columns(row, pixels, keys[-1], holders)
        fields.append(
            _fields(handed_row, trajectory, names, oldest, newest)
            | images
            | dict(columns)
            | {"session_id": sample, "uid": uid}
        )
        tags.append(
            {
                "status": "success",
                "prompt_len": len(handed_row.prompt_ids),
                "response_len": len(handed_row.completion_ids),
                "seq_len": len(handed_row.prompt_ids) + len(handed_row.completion_ids),
                "global_steps": step,
                "min_global_steps": oldest,
                "max_global_steps": newest,
                IMAGES: row_sum(row.branch.input_ids, checksums_of(images["multi_modal_inputs"])),
            }
            | totals
        )
    return keys, fields, tags


def image_columns(row: TrainingRow, pixels: Pixels | None, key: str, holders: dict[str, str]) -> dict[str, Any]:
    """The columns `multi_modal_inputs` and `position_ids` of a row, and `routed_experts` if the row has them.

    A model whose positions have four lines has them in all rows, since one column cannot hold both kinds.
    """
    ids, digests = row.branch.input_ids, images_of(row)
    columns: dict[str, Any] = {"multi_modal_inputs": {}, "position_ids": torch.arange(len(ids))}
    if pixels is not None:
        images = columns["multi_modal_inputs"] = pixels.row(ids, digests)
        images.images = QueuedImages(images.images, key, holders)
        columns["position_ids"] = pixels.positions(ids, digests)
    if row.branch.routed_experts is not None:
        experts = torch.from_numpy(row.branch.routed_experts.astype(np.int16))
        columns["routed_experts"] = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, len(ids) - len(experts)))
    return columns


def versions_of_row(row: TrainingRow) -> tuple[int, int]:
    """The smallest and the largest weight version of a row's trained tokens."""
    versions = row.branch.weight_versions[row.places]
    return int(versions.min()), int(versions.max())


def _fields(row: HandedRow, trajectory: Trajectory, names: Sequence[str], oldest: int, newest: int) -> dict[str, Any]:
    prompts = torch.tensor(row.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(row.completion_ids, dtype=torch.int64)
    mask = torch.tensor(row.mask, dtype=torch.int64)
    scores = torch.zeros(len(row.mask), dtype=torch.float32)
    scores[-1] = trajectory.outcome.reward or 0.0
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": None,
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(row.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        COLUMN: torch.from_numpy(row.advantages.copy()),
        "multi_modal_inputs": {},
        "num_turns": 2 * len(trajectory.turns),
        "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1},
        "extra_fields": {
            "episode_id": trajectory.episode_id,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "reward_extra_info": {name: trajectory.outcome.rewards.get(name, 0.0) for name in names},
        },
    }


def refuse_foreign(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows that another manager wrote.

    Raises:
        TrainError: kind `handover`: a row has no sums, so it has no column of advantages either.
    """
    foreign = [key for key, tag in zip(keys, tags, strict=True) if any(name not in tag for name in TAGS)]
    if foreign:
        raise TrainError(
            f"{len(foreign)} rows of verl's batch were not written by EngineManager, for example {foreign[0]}; set "
            "`actor_rollout_ref.rollout.agent.agent_loop_manager_class`, or another `trainer.v1.trainer_mode`",
            kind="handover",
        )


def check_rows(
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    masks: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    images: Sequence[int],
) -> None:
    """Compare what a batch holds with the sums that the rows' tags say of their groups. Padding of verl is left out.

    `tokens`: of prompt and response; `masks`, `advantages`: [response] each; `images`: `row_sum` of each row.

    Raises:
        TrainError: kind `handover`: the sums differ, so a row, a token or an advantage was lost.
    """
    groups: dict[str, BatchSums] = {}
    rows: list[BatchSums] = []
    for place, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding"):
            continue
        groups[key.rsplit("_", 2)[0]] = BatchSums(*(tag[name] for name in TAGS))
        other = int(tag[IMAGES] != images[place])
        rows.append(BatchSums.of_tensors(tokens[place], masks[place], advantages[place], other))
    BatchSums.total(groups.values()).check(BatchSums.total(rows), "verl", CHANGES)
