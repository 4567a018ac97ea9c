"""A row as a prompt and a completion, and the four sums that are compared on both sides of a hand-over to a trainer.

Invariant: a batch is trained on only if it has as many tokens, as many trained tokens, the same sum of absolute
advantages and the same images in each row as the rows of the engine that it was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.errors import TrainError
from engine.schemas.base import Struct
from engine.train.loss_columns import whitened_advantages

if TYPE_CHECKING:
    import torch

    from engine.plugins.trainers.pixels import Pixels
    from engine.schemas.train import TrainSpec
    from engine.store.rows.row import TrainingRow

SeveralRows = Literal["refuse", "leave_out"]
"""What happens to an episode with several rows under a trainer that takes one for each prompt. `refuse`: the training
stops. `leave_out`: its tokens are not trained, and are counted. Its rewards stay in the baseline of its group."""
_TOLERANCE = 1e-6
"""Relative difference of two sums of absolute advantages that is rounding."""


class HandedRow(Struct, frozen=True, eq=False):
    """One row as most trainers take it: a prompt, and a completion that begins with the first trained token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 on sampled tokens that are trained, 0 on observations, [completion]."""
    logprobs: list[float]
    """The sampler's log-probs; 0.0 on observations, [completion]."""
    advantages: np.ndarray
    """The engine's advantages; 0.0 on observations, float32 [completion]."""
    images: tuple[str, ...] = ()
    """Digests of the images, in order."""
    experts: np.ndarray | None = None
    """Those of the first tokens, [tokens, layers, top_k]; None without `backend.routed_experts`."""

    @classmethod
    def of(cls, row: TrainingRow) -> HandedRow:
        """Cut a training row in front of its first trained token."""
        ids, start = row.branch.input_ids, int(row.places[0])
        return cls(
            ids[:start].tolist(),
            ids[start:].tolist(),
            row.loss_mask()[start:].tolist(),
            row.on_tokens(row.branch.logprobs[row.places])[start:].tolist(),
            row.on_tokens(row.advantages)[start:],
            images_of(row),
            row.branch.routed_experts,
        )

    @classmethod
    def empty(cls, token: int) -> HandedRow:
        """The row of an episode that is not trained on, for trainers that need one row for each prompt. It has no
        trained token.

        Args:
            token: An id of the model's vocabulary, such as the padding.
        """
        return cls([token], [token], [0], [0.0], np.zeros(1, np.float32))


class BatchSums(Struct, frozen=True):
    """The sums of a batch."""

    tokens: int
    """Tokens of prompts and completions, without padding."""
    trained: int
    """Tokens in the loss."""
    advantages: float
    """Sum of the absolute advantages of the tokens in the loss."""
    images: int = 0
    """Sum of `row_sum` over the rows (`pixels.py`): another one if an image is lost, changed, or shown in another
    place or row."""

    @classmethod
    def of_rows(cls, rows: Sequence[HandedRow], pixels: Pixels | None = None) -> BatchSums:
        """The sums of what the engine hands over. `pixels`: None for a model without images."""
        return cls(
            sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows),
            sum(sum(row.mask) for row in rows),
            sum(float(np.abs(row.advantages.astype(np.float64)).sum()) for row in rows),
            sum(pixels.sum([*row.prompt_ids, *row.completion_ids], row.images) for row in rows if pixels is not None),
        )

    @classmethod
    def of_tensors(cls, tokens: int, mask: torch.Tensor, advantages: torch.Tensor, images: int = 0) -> BatchSums:
        """The sums of a trainer's batch, from its tokens without padding, and mask and advantages of one shape."""
        return cls(tokens, int(mask.sum()), float((advantages.double().abs() * mask).sum()), images)

    @classmethod
    def total(cls, parts: Iterable[BatchSums]) -> BatchSums:
        """The sums of several batches together."""
        return cls(*map(sum, zip((0, 0, 0.0, 0), *map(msgspec.structs.astuple, parts), strict=True)))

    def check(self, theirs: BatchSums, trainer: str, changes: str) -> None:
        """Compare the engine's sums with those of what a trainer's loss reads. `changes`: what may have changed them.

        Raises:
            TrainError: kind `handover`: they differ, so a part of the rows was lost or changed on the way.
        """
        apart = abs(self.advantages - theirs.advantages)
        same = (self.tokens, self.trained, self.images) == (theirs.tokens, theirs.trained, theirs.images)
        if same and apart <= _TOLERANCE * max(1.0, self.advantages):
            return
        images = "the same" if self.images == theirs.images else "lost, changed, or in another order or row"
        raise TrainError(
            f"{trainer}'s batch is not what the engine handed over; no update is made with it. "
            f"Tokens: {self.tokens} handed over, {theirs.tokens} in the batch; trained tokens: {self.trained}, "
            f"{theirs.trained}; sum of |advantage|: {self.advantages:.6g}, {theirs.advantages:.6g}; images: {images}. "
            f"Remove what changes the batch ({changes})",
            kind="handover",
        )


def final_rows(rows: Sequence[TrainingRow], train: TrainSpec) -> list[TrainingRow]:
    """The rows of a batch with the advantages that `engine train` gives to its loss."""
    if train.advantage_norm != "batch":
        return list(rows)
    advantages = whitened_advantages([row.advantages for row in rows])
    return [replace(row, advantages=values) for row, values in zip(rows, advantages, strict=True)]


def images_of(row: TrainingRow) -> tuple[str, ...]:
    """The digests of a row's images, in order."""
    return tuple(image.image for image in row.branch.images)


def padded(rows: Sequence[Sequence[float] | np.ndarray], size: int, fill: float = 0.0) -> torch.Tensor:
    """Rows of different lengths as float32 [rows, size]; `fill` on padding. Ids up to 2**24 are exact."""
    import torch

    placed = np.full((len(rows), size), fill, np.float32)
    for place, row in zip(placed, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(placed)


def groups_of(prompts: Sequence[str], samples: int, fix: str) -> list[str]:
    """The task id of each group of a trainer's prompts: task ids, each repeated `samples` times in a row.

    Raises:
        TrainError: kind `train_setup`: the prompts are not groups.
    """
    if len(prompts) % samples or any(prompts[at] != prompts[at - at % samples] for at in range(len(prompts))):
        raise TrainError(
            f"the batch of {len(prompts)} prompts is not made of groups of {samples}: the advantages of a group need "
            f"all of its episodes; {fix}",
            kind="train_setup",
        )
    return list(prompts[::samples])


def one_row_each(
    rows: Sequence[tuple[int, TrainingRow]],
    groups: int,
    samples: int,
    *,
    trainer: str,
    several: SeveralRows,
    leave_out: str,
) -> tuple[list[HandedRow], int, int]:
    """One row for each prompt, in the trainer's order: all samples of the first group, then those of the second. With
    them: how many have no trained token, and the sampled tokens that are not trained because their episode has several
    rows.

    `rows`: at least one, each with the number of its group; `leave_out`: how a user chooses it, for the message.

    Raises:
        TrainError: kind `handover`: an episode has several rows, and `several` is `refuse`.
    """
    counts = Counter((number, row.episode.sample_index) for number, row in rows)
    placed: dict[tuple[int, int], HandedRow] = {}
    left_out = 0
    for number, row in rows:
        place = number, row.episode.sample_index
        if counts[place] == 1:
            placed[place] = HandedRow.of(row)
        elif several == "leave_out":
            left_out += len(row.places)
        else:
            raise TrainError(
                f"{row.episode.episode_id} has {counts[place]} rows, and {trainer} takes one for each prompt. Use a "
                "chat template that does not "
                f"rewrite history, leave such episodes out with `{leave_out}`, or train with `engine train`, which "
                "takes all rows",
                kind="handover",
            )
    none = HandedRow.empty(int(rows[0][1].branch.input_ids[0]))
    in_order = [placed.get((number, sample), none) for number in range(groups) for sample in range(samples)]
    return in_order, groups * samples - len(placed), left_out
