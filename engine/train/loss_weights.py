"""Loss weights: the factor of each trained token in the loss of a step. They define what a loss averages over.

The loss of a step is the sum over its tokens of loss weight times token loss, so it can be computed in any number of
parts and processes and added up. Denominators are counted over the whole step and count trained tokens only: no padding,
no prompt tokens, no masked tokens.

With E episodes, T trained tokens in the token's episode (all rows), and t trained tokens of an episode, summed over episodes:

    grpo, gspo, sapo   1 / (E * T)             mean over the tokens of an episode, then over episodes: GRPO (arXiv
                                               2402.03300, equation 3), GSPO (2507.18071, 5), SAPO (2511.20347)
    bnpo               1 / sum of t            mean over the tokens of the mini-batch
    dapo, ppo, cispo   M / sum of t            mean over the tokens of the step, for all M mini-batches alike: DAPO
                                               (2503.14476, 8), CISPO (MiniMax-M1, 2506.13585, 4)
    dr_grpo            1 / (E * length)        a constant instead of T: Dr. GRPO (2503.20783)
    reinforce          1 / E                   sum over the tokens of an episode; its gradient is that of the expected
                                               reward: RLOO (2402.14740)

With several mini-batches, E and the sum of t are counted per mini-batch. Exceptions are `dapo`, `ppo` and `cispo`: a token has
the same weight in every mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.errors import TrainError
from engine.schemas.train import BnpoLoss, DrGrpoLoss, GrpoLoss, GspoLoss, LossSpec, ReinforceLoss, SapoLoss

Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def token_loss_weights(
    loss: LossSpec,
    lengths: Sequence[int] | Counts,
    episodes: Sequence[str],
    *,
    minibatches: Sequence[int] | Counts | None = None,
    length: int | None = None,
) -> list[Values]:
    """Compute the loss weight of each trained token of the rows of a step.

    Args:
        loss: The loss, which defines the average.
        lengths: Number of trained tokens of each row, int64 [rows].
        episodes: Episode id of each row, [rows]. An episode without trained tokens is not counted.
        minibatches: Number of the mini-batch (optimizer step) of each row, [rows]. Default: one mini-batch.
        length: Maximum tokens of an episode, for `dr_grpo` without `length`.

    Returns:
        For each row, float64 [trained tokens].

    Raises:
        TrainError: kind `train_setup`: `dr_grpo` without a length, or an episode in two mini-batches.
    """
    if isinstance(loss, DrGrpoLoss) and (loss.length or length) is None:
        raise TrainError(
            "`train.loss.kind: dr_grpo` divides by a constant length; set `train.loss.length`, or `limits.episode_tokens`",
            kind="train_setup",
        )
    tokens = np.asarray(lengths, np.int64)
    if not tokens.any():
        return [np.zeros(0) for _ in tokens]
    batch = np.zeros(len(tokens), np.int64) if minibatches is None else _numbered(minibatches)
    episode = _numbered(episodes)
    of_batch, of_episode = _sums(tokens, batch), _sums(tokens, episode)
    together = _episodes(episode, batch, tokens)[batch]
    with np.errstate(divide="ignore"):  # rows without trained tokens: the weight is not used
        if isinstance(loss, GrpoLoss | GspoLoss | SapoLoss):
            loss_weights = 1.0 / (together * of_episode[episode])
        elif isinstance(loss, BnpoLoss):
            loss_weights = 1.0 / of_batch[batch]
        elif isinstance(loss, DrGrpoLoss):
            loss_weights = 1.0 / (together * float(loss.length or length or 1))
        elif isinstance(loss, ReinforceLoss):
            loss_weights = 1.0 / together
        else:
            loss_weights = np.full(len(tokens), np.count_nonzero(of_batch) / tokens.sum())
    return [
        np.full(count, loss_weight) for count, loss_weight in zip(tokens.tolist(), loss_weights.tolist(), strict=True)
    ]


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
