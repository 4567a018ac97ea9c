"""Each trained token's loss_weight of a step's loss: what the losses average over.

A step's loss is the sum of loss_weight times loss over its tokens, so it can be computed in any parts, on any number of
machines, and added up. What is divided by is counted once over the whole step and counts trained tokens only: nothing
that is padded, prompted or masked.

    one of the E episodes, of T trained tokens in all its rows (t over all episodes)

    grpo, gspo, sapo   1 / (E * T)             the mean over an episode's tokens, then over episodes: GRPO (arXiv
                                               2402.03300, equation 3), GSPO (2507.18071, 5), SAPO (2511.20347)
    bnpo               1 / sum of t            the mean over the mini-batch's tokens
    dapo, ppo, cispo   M / sum of t            the mean over the step's tokens, over all M mini-batches alike: DAPO
                                               (2503.14476, 8), CISPO (MiniMax-M1, 2506.13585, 4)
    dr_grpo            1 / (E * length)        a constant in place of T: Dr. GRPO (2503.20783)
    reinforce          1 / E                   the sum over an episode's tokens, which is the gradient of the expected
                                               reward: RLOO (2402.14740)

With several mini-batches E and sum of t are a mini-batch's own, but for `dapo`, `ppo` and `cispo`, where a token counts
the same whichever mini-batch it fell into.
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
    """The loss_weight of each trained token of a step's rows.

    Args:
        loss: Says what is averaged over.
        lengths: Each row's trained tokens, [rows].
        episodes: Each row's episode, [rows]. One of which nothing trains is not counted.
        minibatches: The mini-batch (optimizer step) that each row falls into, [rows]; one for all when left out.
        length: Tokens that an episode may have, for `dr_grpo` without a `length` of its own.

    Returns:
        For each row, float64 of [trained tokens].

    Raises:
        TrainError: `dr_grpo` without a length, or an episode in two mini-batches.
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
    with np.errstate(divide="ignore"):  # rows of which nothing trains have no token that would take their loss_weight
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
    """Equal names as equal numbers from 0 on."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


def _sums(tokens: Counts, group: Counts) -> Values:
    """Tokens by group."""
    return np.bincount(group, weights=tokens).astype(np.float64)


def _episodes(episode: Counts, batch: Counts, tokens: Counts) -> Values:
    """Episodes with trained tokens by mini-batch."""
    pairs = np.unique(np.stack([episode, batch])[:, tokens > 0], axis=1)
    if pairs.shape[1] != len(np.unique(pairs[0])):
        raise TrainError(
            "the rows of one episode are in two mini-batches; keep an episode together", kind="train_setup"
        )
    return np.bincount(pairs[1], minlength=batch.max() + 1).astype(np.float64)
