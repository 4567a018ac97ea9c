"""The rows of a step -> the factor of each trained token in its loss, which defines what the loss averages over.

The loss of a step is the sum over its tokens of loss weight times token loss, so it can be computed in any number of
parts and processes and added up. Denominators are counted over the whole step and count trained tokens only: no padding,
no prompt tokens, no masked tokens.

A loss declares its denominator (`engine.schemas.loss`). With E episodes, T trained tokens in the token's episode (all rows), and t
trained tokens of an episode, summed over episodes, the weight of a token is:

    episode_tokens     1 / (E * T)             mean over the tokens of an episode, then over episodes: GRPO (arXiv
                                               2402.03300, equation 3), GSPO (2507.18071, 5), SAPO (2511.20347)
    minibatch_tokens   1 / sum of t            mean over the tokens of the mini-batch: BNPO
    step_tokens        M / sum of t            mean over the tokens of the step, for all M mini-batches alike: DAPO
                                               (2503.14476, 8), CISPO (MiniMax-M1, 2506.13585, 4), PPO
    constant_length    1 / (E * length)        a constant instead of T: Dr. GRPO (2503.20783); by default the mean T of the
                                               training's first step
    episodes           1 / E                   sum over the tokens of an episode; its gradient is that of the expected
                                               reward: REINFORCE, RLOO (2402.14740)

With several mini-batches, E and the sum of t are counted per mini-batch. The exception is `step_tokens`: a token has the same
weight in every mini-batch, and the sum of t is that of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engine.errors import TrainError
from engine.schemas.base import Struct
from engine.schemas.loss import Denominator, Loss

if TYPE_CHECKING:
    from engine.train.loss_columns import LossColumns

Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class _StepCounts(Struct, frozen=True, kw_only=True, eq=False):
    """What the denominators are counted from. Arrays of [rows]; rows without trained tokens give weights that are not used."""

    episodes: Values
    """Episodes with trained tokens in the row's mini-batch."""
    episode_tokens: Values
    """Trained tokens of the row's episode."""
    minibatch_tokens: Values
    """Trained tokens of the row's mini-batch."""
    minibatches: int
    """Mini-batches with trained tokens."""
    step_tokens: int
    """Trained tokens of the step."""
    length: float
    """Tokens per episode of `constant_length`."""


_WEIGHTS: Mapping[Denominator, Callable[[_StepCounts], Values]] = {
    "episode_tokens": lambda step: 1.0 / (step.episodes * step.episode_tokens),
    "minibatch_tokens": lambda step: 1.0 / step.minibatch_tokens,
    "step_tokens": lambda step: np.full(len(step.episodes), step.minibatches / step.step_tokens),
    "constant_length": lambda step: 1.0 / (step.episodes * step.length),
    "episodes": lambda step: 1.0 / step.episodes,
}
"""The loss weight of the tokens of each row, [rows], by denominator."""


def token_loss_weights(
    loss: Loss,
    lengths: Sequence[int] | Counts,
    episodes: Sequence[str],
    *,
    minibatches: Sequence[int] | Counts | None = None,
    length: float | None = None,
) -> list[Values]:
    """Compute the loss weight of each trained token of the rows of a step.

    Args:
        loss: The loss, which defines the average.
        lengths: Number of trained tokens of each row, int64 [rows].
        episodes: Episode id of each row, [rows]. An episode without trained tokens is not counted.
        minibatches: Number of the mini-batch (optimizer step) of each row, [rows]. Default: one mini-batch.
        length: Tokens per episode: the constant of `constant_length` if the loss gives none.

    Returns:
        For each row, float64 [trained tokens].

    Raises:
        TrainError: kind `train_setup`: `constant_length` without a length, or an episode in two mini-batches.
    """
    constant = loss.constant_length or length
    if loss.denominator == "constant_length" and constant is None:
        raise TrainError("`train.loss` divides by a constant length; set `train.loss.length`", kind="train_setup")
    tokens = np.asarray(lengths, np.int64)
    if not tokens.any():
        return [np.zeros(0) for _ in tokens]
    batch = np.zeros(len(tokens), np.int64) if minibatches is None else _numbered(minibatches)
    episode = _numbered(episodes)
    of_batch, of_episode = _sums(tokens, batch), _sums(tokens, episode)
    together = _episodes(episode, batch, tokens)[batch]
    step = _StepCounts(
        episodes=together,
        episode_tokens=of_episode[episode],
        minibatch_tokens=of_batch[batch],
        minibatches=int(np.count_nonzero(of_batch)),
        step_tokens=int(tokens.sum()),
        length=float(constant or 1),
    )
    with np.errstate(divide="ignore"):  # rows without trained tokens: the weight is not used
        loss_weights = _WEIGHTS[loss.denominator](step)
    return [
        np.full(count, loss_weight) for count, loss_weight in zip(tokens.tolist(), loss_weights.tolist(), strict=True)
    ]


def mean_episode_length(lengths: Sequence[int] | Counts, episodes: Sequence[str]) -> float | None:
    """The mean number of trained tokens of the episodes that have some; None if none has.

    Arguments as in `token_loss_weights`, [rows] each.
    """
    trained = {episode for episode, count in zip(episodes, lengths, strict=True) if count}
    return int(np.sum(lengths)) / len(trained) if trained else None


def weighted_parts(loss: Loss, parts: Sequence[Sequence[LossColumns]], length: float | None) -> list[list[LossColumns]]:
    """The mini-batches of a batch with loss weights. `length`: the constant of `constant_length` if the loss gives none."""
    lengths, episodes = _lengths([of_row for part in parts for of_row in part])
    numbers = [number for number, part in enumerate(parts) for _ in part]
    weights = iter(token_loss_weights(loss, lengths, episodes, minibatches=numbers, length=length))
    return [[replace(of_row, weights=next(weights)) for of_row in part] for part in parts]


def mean_length_of(columns: Sequence[LossColumns]) -> float | None:
    """The mean number of trained tokens of a batch's episodes that have some; None if none has."""
    return mean_episode_length(*_lengths(columns))


def _lengths(columns: Sequence[LossColumns]) -> tuple[list[int], list[str]]:
    """The number of trained tokens of each row, and the id of its episode."""
    rows = [of_row.row for of_row in columns]
    return [len(row.places) for row in rows], [row.episode.episode_id for row in rows]


def _numbered(names: Sequence[str] | Sequence[int] | Counts) -> Counts:
    """Number the distinct names from 0; equal names get equal numbers. int64 [names]."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


def _sums(tokens: Counts, group: Counts) -> Values:
    """Number of tokens by group. float64 [groups]."""
    return np.bincount(group, weights=tokens).astype(np.float64)


def _episodes(episode: Counts, batch: Counts, tokens: Counts) -> Values:
    """Number of episodes with trained tokens by mini-batch. float64 [mini-batches]."""
    pairs = np.unique(np.stack([episode, batch])[:, tokens > 0], axis=1)
    if pairs.shape[1] != len(np.unique(pairs[0])):
        raise TrainError(
            "the rows of one episode are in two mini-batches; keep an episode together", kind="train_setup"
        )
    return np.bincount(pairs[1], minlength=batch.max() + 1).astype(np.float64)
