"""The trained tokens of a micro-batch as flat tensors: the input of losses, KL penalty and rollout correction."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """Tensors [n] for n trained tokens, ordered by row, on one device.

    A micro-batch holds whole rows, so means over a turn or a row can be computed within it. All log-probs are those of
    the sampled token at the sampler's temperature, in nats.

        tokens = Tokens(logprobs, proximal=logprobs.detach(), sampler=sampled, advantages=a, loss_weights=w, rows=r, turns=t)
        loss, tally = objective(spec, tokens)
        loss.backward()
    """

    logprobs: Tensor
    """Log-probs of the current policy, with their graph."""
    proximal: Tensor
    """Log-probs in the denominator of the clipped ratio: the trainer's before the batch's first update, or the sampler's."""
    sampler: Tensor
    """Log-probs of the sampler (the behaviour policy)."""
    advantages: Tensor
    loss_weights: Tensor
    """Factor of each token in the loss of the step (`engine.train.loss_weights`)."""
    rows: Tensor
    """int64: number of the token's row."""
    turns: Tensor
    """int64: number of the token's turn; turns of different rows have different numbers."""
    reference: Tensor | None = None
    """Log-probs of the reference model; needed for `kl`."""
    entropy: Tensor | None = None
    """Entropy of the current policy's distribution at the token, in nats, with its graph; needed for `entropy_coefficient`."""
    valued: ValueTokens | None = None
    """What the value loss of a critic needs."""


@dataclass(frozen=True, eq=False, slots=True)
class ValueTokens:
    """Tensors [n] of the value loss, in the order of the tokens."""

    values: Tensor
    """A critic's values before the tokens, with their graph."""
    old: Tensor
    """The values before the batch's first update."""
    returns: Tensor
    """The targets of the values."""
    weights: Tensor
    """Factor of each token in the value loss: 0 where no value is trained."""
