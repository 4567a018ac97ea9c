"""The trained tokens of one micro-batch, laid out flat: what losses, KL and corrections are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """Tensors of [n] for n trained tokens, rows one after another, on one device.

    A micro-batch holds whole rows: what is averaged over a turn or a row is averaged within it. All log-probs are of
    the sampled token, at the sampler's temperature, in nats.

        tokens = Tokens(logprobs, proximal=logprobs.detach(), sampler=sampled, advantages=a, loss_weights=s, rows=r, turns=t)
        loss, tally = objective(spec, tokens)
        loss.backward()
    """

    logprobs: Tensor
    """The current policy's, with their graph."""
    proximal: Tensor
    """Those that the clipped ratio is against: the trainer's before the batch's first update, or the sampler's."""
    sampler: Tensor
    """Those that the token was drawn with (the behaviour policy's)."""
    advantages: Tensor
    loss_weights: Tensor
    """Each token's share of the step's loss (`engine.train.loss_weights`)."""
    rows: Tensor
    """int64: tokens with the same number are of one row."""
    turns: Tensor
    """int64: tokens with the same number are of one turn of one row."""
    reference: Tensor | None = None
    """The reference model's; needed for `kl`."""
    entropy: Tensor | None = None
    """Of the current policy's whole distribution at the token, in nats, with its graph; needed for `entropy`."""
