"""What AReaL's `RolloutWorkflow` returns, with the engine's advantages, and the sums that are compared before the
update.

AReaL computes `advantages = rewards − values` if `actor.discount` is 0 and there is no critic, so the column `values`
holds the negative advantages. AReaL places the reward of a row at its last token, so the value there is the reward
minus the advantage, and the column `rewards` keeps the true reward for AReaL's logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow, images_of, padded
from engine.plugins.trainers.pixels import checksums_of, row_sum

SUMS = ("engine_tokens", "engine_trained", "engine_advantage", "engine_images")
"""Columns with the sums of each row, float64 [rows]: how many tokens it has, how many are trained, its sum of absolute
advantages, and the sum over its images."""
CHANGES = "a filter, a critic, or an overridden method that changes rows, columns or images"

if TYPE_CHECKING:
    from engine.plugins.trainers.pixels import Pixels, RowImages
    from engine.store.rows.row import TrainingRow


class ImageDict(dict[str, Any]):
    """The images of one row as the dictionary that AReaL takes: a read makes float tensors, pickles share the pixels.

    A row without images has a grid of no images: AReaL computes the positions of a batch only where it finds a grid.
    """

    def __init__(self, images: RowImages) -> None:
        super().__init__(dict.fromkeys(images or ("image_grid_thw",)))
        self.images = images

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = dict(self.items())
        return tensors[name]

    def items(self) -> Any:
        """All tensors by name; they are made once."""
        return self.images.items() if self.images else {"image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}.items()

    def __reduce__(self) -> Any:
        return type(self), (self.images,)


def trajectory(
    rows: Sequence[TrainingRow],
    rewards: Sequence[float],
    *,
    actor: Any,
    pixels: Pixels | None = None,
) -> dict[str, Any]:
    """Make what `RolloutWorkflow.arun_episode` returns: the rows as tensors, padded on the right.

    Args:
        rows: The rows.
        rewards: The reward of each row's episode, for AReaL's logs.
        actor: AReaL's `PPOActorConfig`; `reward_bias`, `reward_scaling` and `reward_clip` change the reward that AReaL
            places.
        pixels: What makes the images of rows, if the model takes images. Then every trajectory has `multi_modal_input`
            (an `ImageDict` for each row) and `mm_token_type_ids` int64 [rows, tokens]: AReaL needs the same keys in
            all.

    Returns:
        `input_ids` int32, `attention_mask` bool, `loss_mask` int32, `logprobs` float32, `versions` int32 (-1 on tokens
        that were not sampled) and `values` float32, all [rows, tokens]; `rewards` float32 [rows]; the columns `SUMS`.
    """
    lengths = torch.tensor([len(row.branch.input_ids) for row in rows])
    size = int(lengths.max())
    values = padded([-row.on_tokens(row.advantages) for row in rows], size, 0.0)
    values = torch.roll(values, -1, 1)  # position t holds what is of token t + 1
    given = torch.tensor(list(rewards), dtype=torch.float32)
    placed = torch.clip(
        (given + actor.reward_bias) * actor.reward_scaling, max=actor.reward_clip, min=-actor.reward_clip
    )
    values[torch.arange(len(rows)), torch.clip(lengths - 2, min=0)] += placed
    columns: dict[str, Any] = {
        "input_ids": padded([row.branch.input_ids for row in rows], size, 0).int(),
        "attention_mask": torch.arange(size)[None] < lengths[:, None],
        "loss_mask": padded([row.loss_mask() for row in rows], size, 0).int(),
        "logprobs": padded([row.on_tokens(row.branch.logprobs[row.places]) for row in rows], size, 0.0),
        "versions": padded([row.branch.weight_versions for row in rows], size, -1).int(),
        "values": values,
        "rewards": given,
    }  # fmt: skip
    sums = [BatchSums.of_rows([HandedRow.of(row)], pixels) for row in rows]
    for name, column in zip(SUMS, ("tokens", "trained", "advantages", "images"), strict=True):
        columns[name] = torch.tensor([getattr(of_row, column) for of_row in sums], dtype=torch.float64)
    if pixels is not None:
        columns["multi_modal_input"] = [ImageDict(pixels.row(row.branch.input_ids, images_of(row))) for row in rows]
        columns["mm_token_type_ids"] = torch.tensor(pixels.vision.token_types(columns["input_ids"].tolist()))
    return columns


def sums_of_batch(batch: Mapping[str, torch.Tensor]) -> BatchSums:
    """The sums of what `PPOActor.compute_advantages` returns, [rows, tokens], without that of the images.

    `loss_mask` and `advantages` are one token to the left of `input_ids`.
    """
    return BatchSums.of_tensors(int(batch["attention_mask"].sum()), batch["loss_mask"], batch["advantages"])


class Local(dict[str, Any]):
    """A batch, or the images of a row, whose tensors on other machines are fetched when they are read."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value.to_local() if hasattr(value, "to_local") else value


def _images_of_rows(batch: Mapping[str, Any]) -> list[int]:
    """`row_sum` of each row of AReaL's batch; none if it has not one entry of images for each row."""
    lengths = batch["attention_mask"].sum(1).tolist()
    shown = batch.get("multi_modal_input", [{}] * len(lengths))
    if len(shown) != len(lengths):
        return []
    images = [checksums_of(of_row.images if isinstance(of_row, ImageDict) else Local(of_row)) for of_row in shown]
    return [row_sum(row[:size], of_row) for row, size, of_row in zip(batch["input_ids"], lengths, images, strict=True)]


def check_batches(batches: Sequence[dict[str, Any]]) -> None:
    """Compare what AReaL's loss will read, a batch for each group, with the columns `SUMS`, and remove these.

    Raises:
        TrainError: kind `handover`: the sums differ, or a batch has no sums because another workflow made it.
    """
    fetched = [Local(batch) for batch in batches]
    missing = sorted({name for batch in batches for name in SUMS if name not in batch})
    if missing:
        raise TrainError(
            f"AReaL's batch has no column {', '.join(missing)}: it was not made by the engine's workflow, or a filter "
            "dropped columns; no update is made with it",
            kind="handover",
        )
    handed = [sum(float(batch[name].sum()) for batch in fetched) for name in SUMS[:3]]
    other = sum(batch["engine_images"].tolist() != _images_of_rows(batch) for batch in fetched)  # row by row
    theirs = BatchSums.total([*map(sums_of_batch, fetched), BatchSums(0, 0, 0.0, other)])
    BatchSums(int(handed[0]), int(handed[1]), handed[2]).check(theirs, "AReaL", CHANGES)
    for batch in batches:
        for name in SUMS:
            del batch[name]
