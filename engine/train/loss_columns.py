"""What the learner computes beside the rows of a batch: one number for each trained token. The rows themselves do not
change.

The loss weight of a token is its factor in the loss, which defines what the loss averages over.
The loss of a step is the sum over its tokens of loss weight times token loss, so it can be computed in any number of
parts and processes and added up. Denominators are counted over the whole step and count trained tokens only: no
padding, no prompt tokens, no masked tokens.

A loss declares its denominator (`engine.schemas.loss`). With E episodes, T trained tokens in the token's episode (all
rows), and t trained tokens of an episode, summed over episodes, the weight of a token is:

    episode_tokens     1 / (E * T)             mean over the tokens of an episode, then over episodes: GRPO (arXiv
                                               2402.03300, equation 3), GSPO (2507.18071, 5), SAPO (2511.20347)
    minibatch_tokens   1 / sum of t            mean over the tokens of the mini-batch: BNPO
    step_tokens        M / sum of t            mean over the tokens of the step, for all M mini-batches alike: DAPO
                                               (2503.14476, 8), CISPO (MiniMax-M1, 2506.13585, 4), PPO
    constant_length    1 / (E * length)        a constant instead of T: Dr. GRPO (2503.20783); by default the mean T
                                               of the training's first step
    episodes           1 / E                   sum over the tokens of an episode; its gradient is that of the expected
                                               reward: REINFORCE, RLOO (2402.14740)

With several mini-batches, E and the sum of t are counted per mini-batch. The exception is `step_tokens`: a token has
the same weight in every mini-batch, and the sum of t is that of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engine.errors import TrainError
from engine.runner.batch import ZERO_ADVANTAGE
from engine.schemas.base import Struct
from engine.schemas.loss import Denominator, Loss
from engine.store.rows.row import Doubles, Floats, TrainingRow

Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class LossColumns(Struct, frozen=True, kw_only=True):
    """A row with what its loss reads. n: the number of `row.places`."""

    row: TrainingRow
    advantages: Floats
    """Those of the row, unless a critic, penalties or whitening changed them. float32 [n]."""
    proximal: Floats | None = None
    """The policy's log-probs before the first update of the batch, float32 [n]; None if they are not computed
    separately."""
    weights: Doubles = msgspec.field(default_factory=lambda: np.zeros(0))
    """Loss weights, which depend on the mini-batch: float64 [n]."""
    extra: Mapping[str, Doubles] = msgspec.field(default_factory=dict)
    """Columns of other objectives by name, float64 [n] each. Of a critic: `values`, their targets `returns` and
    `has_value`, which is 1.0 on tokens before which a value is trained. `penalties`: see `credited_rows.py`."""

    @classmethod
    def of(cls, row: TrainingRow) -> LossColumns:
        """The columns of a row whose advantages are final."""
        return cls(row=row, advantages=row.advantages)


def minibatches(columns: Sequence[LossColumns], count: int, seed: tuple[int, int, int]) -> list[list[LossColumns]]:
    """Split the rows of a batch into `count` parts with about equally many tasks. Rows of one task stay together."""
    if count == 1:
        return [list(columns)]
    by_task: dict[str, list[LossColumns]] = {}
    for of_row in columns:
        by_task.setdefault(of_row.row.episode.task_id, []).append(of_row)
    tasks = list(by_task)
    order = np.random.default_rng(seed).permutation(len(tasks))
    parts = [part for part in np.array_split(order, count) if len(part)]
    return [[of_row for place in part for of_row in by_task[tasks[place]]] for part in parts]


def whitened_advantages(advantages: Sequence[Floats]) -> list[Floats]:
    """Whiten the advantages of the rows of a batch to mean 0 and standard deviation 1 over their trained tokens.

    REINFORCE++ (arXiv 2501.03262, section 3.2). If all advantages are equal, only the mean is subtracted.

    Args:
        advantages: For each row, float32 [n], as the result.
    """
    if not any(len(of_row) for of_row in advantages):
        return list(advantages)
    flat = np.concatenate(advantages).astype(np.float64)
    mean, spread = flat.mean(), flat.std()
    scale = 1.0 / spread if spread > ZERO_ADVANTAGE else 1.0
    return [((of_row - mean) * scale).astype(np.float32) for of_row in advantages]


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
    batch, episode = (
        np.unique(np.asarray(names), return_inverse=True)[1]
        for names in (np.zeros(len(tokens)) if minibatches is None else minibatches, episodes)
    )
    of_batch, of_episode = np.bincount(batch, weights=tokens), np.bincount(episode, weights=tokens)
    pairs = np.unique(np.stack([episode, batch])[:, tokens > 0], axis=1)
    if pairs.shape[1] != len(np.unique(pairs[0])):
        raise TrainError(
            "the rows of one episode are in two mini-batches; keep an episode together", kind="train_setup"
        )
    together = np.bincount(pairs[1], minlength=len(of_batch)).astype(np.float64)[batch]
    with np.errstate(divide="ignore"):  # rows without trained tokens: the weight is not used
        by_denominator: dict[Denominator, Values] = {
            "episode_tokens": 1.0 / (together * of_episode[episode]),
            "minibatch_tokens": 1.0 / of_batch[batch],
            "step_tokens": np.full(len(tokens), np.count_nonzero(of_batch) / tokens.sum()),
            "constant_length": 1.0 / (together * float(constant or 1)),
            "episodes": 1.0 / together,
        }
    weights = by_denominator[loss.denominator].tolist()
    return [np.full(count, weight) for count, weight in zip(tokens.tolist(), weights, strict=True)]


def weighted_parts(loss: Loss, parts: Sequence[Sequence[LossColumns]], length: float | None) -> list[list[LossColumns]]:
    """The mini-batches of a batch with loss weights. `length`: the constant of `constant_length` if the loss gives
    none."""
    rows = [of_row.row for part in parts for of_row in part]
    lengths, episodes = [len(row.places) for row in rows], [row.episode.episode_id for row in rows]
    numbers = [number for number, part in enumerate(parts) for _ in part]
    weights = iter(token_loss_weights(loss, lengths, episodes, minibatches=numbers, length=length))
    return [[replace(of_row, weights=next(weights)) for of_row in part] for part in parts]


def mean_length_of(columns: Sequence[LossColumns]) -> float | None:
    """The mean number of trained tokens of a batch's episodes that have some; None if none has."""
    rows = [of_row.row for of_row in columns]
    trained = {row.episode.episode_id for row in rows if len(row.places)}
    return sum(len(row.places) for row in rows) / len(trained) if trained else None
