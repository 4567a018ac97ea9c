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
