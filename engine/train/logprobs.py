"""Hidden states and labels -> log-probs and entropies, without the full logits in memory.

    z = (hidden @ weight.T + bias) / temperature        over the ids that can be sampled
    logprob = z[label] - lse(z)                         d/dz_j = [j = label] - p_j
    entropy = lse(z) - sum_j p_j z_j                    d/dz_j = -p_j (z_j - lse(z) + entropy)

The logits are computed in blocks (tokens × vocabulary) with a running maximum and sum, as in FlashAttention (arXiv
2205.14135, algorithm 1). The backward pass recomputes them, with two exceptions. If all logits fit in `chunk_elements`,
they are kept. If the output layer is not trained (LoRA), the forward pass also sums up sum_j p_j weight_j, which is all
that the gradient of `hidden` needs.

Invariants:
- At most `chunk_elements` logits are in memory at the same time.
- Ids that cannot be sampled have probability 0 and gradient 0 for any logits, so 0 * inf does not occur.
- Sums are float32 or float64. Gradients of the weights are summed over all tokens before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

MASKED_LOGIT = -1e30
"""The logit of an id that cannot be sampled: finite, with exponential 0."""
CPU_BLOCK_ELEMENTS = 1 << 21
"""Logits of a block on a CPU at most, so that a block fits in the cache (`PackedModel`)."""
MAX_BLOCK_TOKENS = 4096
"""Maximum tokens in a block."""


@dataclass(frozen=True, slots=True)
class _LogitSettings:
    """How log-probs are computed from hidden states."""

    temperature: float
    banned: tuple[int, ...]
    chunk_elements: int
    vocab: int
    softcap: float | None
    entropy: bool
    learns: bool
    """Whether gradients are enabled."""
    dtype: torch.dtype
    """Dtype of the matrix products."""
    total: torch.dtype
    """Dtype of the sums."""

    @property
    def scales_hidden(self) -> bool:
        """Whether the hidden states are divided by the temperature instead of the logits."""
        return self.softcap is None and self.dtype == self.total

    def operand(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states as they are multiplied, [n, H]."""
        hidden = hidden.to(self.dtype)
        return hidden / self.temperature if self.scales_hidden and self.temperature != 1.0 else hidden


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    banned: Sequence[int],
    chunk_elements: int,
    bias: torch.Tensor | None = None,
    entropy: bool,
    vocab: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs of `labels` and the entropies of their distributions.

    Args:
        hidden: [n, H], hidden states before the output layer.
        weight: [V, H], weights of the output layer.
        labels: int64 [n].
        temperature: Divides the logits; greater than 0.
        banned: Ids that are never sampled.
        chunk_elements: Maximum logits in memory at the same time.
        bias: [V], bias of the output layer.
        entropy: Whether to compute entropies. They have a gradient as well.
        vocab: Ids from this one on are never sampled. None: all ids can be sampled.
        softcap: Replaces logits by softcap * tanh(logits / softcap) before the temperature. None: no cap.

    Returns:
        Log-probs [n] and entropies [n] or None, in nats, float32 (float64 for float64 hidden states). The log-prob of a
        label that cannot be sampled is -inf.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    limit = min(weight.shape[0], vocab or weight.shape[0])
    settings = _LogitSettings(
        temperature=temperature,
        banned=tuple(sorted({int(token) for token in banned if 0 <= token < limit})),
        chunk_elements=chunk_elements,
        vocab=limit,
        softcap=softcap,
        entropy=entropy,
        learns=torch.is_grad_enabled(),
        dtype=dtype,
        total=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
    )
    logprobs, entropies = _LogProbs.apply(hidden, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


def _block_sizes(count: int, vocab: int, chunk_elements: int) -> tuple[int, int]:
    """Tokens and ids of a block of logits."""
    tokens = max(1, min(count, MAX_BLOCK_TOKENS, chunk_elements))
    return tokens, max(1, min(vocab, chunk_elements // tokens))


def representative_vocab(count: int, vocab: int, chunk_elements: int) -> int:
    """The fewest ids with which the log-probs of `count` tokens take the memory that they take with `vocab` ids: blocks
    of logits follow each other, so two whole ones and the last one have all sizes."""
    ids = _block_sizes(count, vocab, chunk_elements)[1]
    return min(vocab // ids, 2) * ids + vocab % ids


@dataclass(slots=True)
class _Block:
    """One block of logits: a range of tokens × a range of ids."""

    tokens: slice
    ids: slice
    weight: torch.Tensor
    """[ids, H], in the dtype of the matrix products."""
    logits: torch.Tensor
    """[tokens, ids], divided by the temperature; `MASKED_LOGIT` for banned ids."""
    slope: torch.Tensor | None
    """Derivative of capped by uncapped logits; None without softcap."""


def _blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: _LogitSettings,
    *,
    fresh: bool,
) -> Iterator[_Block]:
    """All blocks of logits: for each range of ids, all ranges of tokens.

    Args:
        hidden: Those of `_LogitSettings.operand`.
        fresh: Allocate memory for each block, so that blocks can be kept. Else all blocks use the same memory.
    """
    count, (most, width) = len(hidden), _block_sizes(len(hidden), settings.vocab, settings.chunk_elements)
    scratch = hidden.new_empty(0 if fresh else most * width)
    all_banned = torch.tensor(settings.banned, dtype=torch.long)
    for low in range(0, settings.vocab, width):
        ids = slice(low, min(low + width, settings.vocab))
        part = weight[ids].to(settings.dtype)
        shift = None if bias is None else bias[ids].to(settings.total)
        if shift is not None and settings.scales_hidden:
            shift = shift / settings.temperature
        banned = (all_banned[(all_banned >= ids.start) & (all_banned < ids.stop)] - ids.start).to(weight.device)
        for first in range(0, count, most):
            tokens, slope = slice(first, min(first + most, count)), None
            size = (tokens.stop - tokens.start, ids.stop - ids.start)
            buffer = hidden.new_empty(size) if fresh else scratch[: size[0] * size[1]].view(size)
            logits = torch.mm(hidden[tokens], part.t(), out=buffer).to(settings.total)
            if shift is not None:
                logits.add_(shift).clamp_(min=MASKED_LOGIT)
            if settings.softcap is not None:
                logits.div_(settings.softcap).tanh_()
                slope = 1.0 - logits * logits
                logits.mul_(settings.softcap)
            if not settings.scales_hidden and settings.temperature != 1.0:
                logits.div_(settings.temperature)
            if len(banned):
                logits.index_fill_(1, banned, MASKED_LOGIT)
            yield _Block(tokens, ids, part, logits, slope)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: _LogitSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        learns = settings.learns and (by_hidden or by_weight or by_bias)
        sum_weights = learns and by_hidden and not (by_weight or by_bias or settings.softcap)
        keep = learns and not sum_weights and hidden.shape[0] * settings.vocab <= settings.chunk_elements
        blocks = _blocks(settings.operand(hidden), weight, bias, settings, fresh=keep)
        means = hidden.new_zeros(hidden.shape, dtype=settings.total) if sum_weights else None
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.blocks = settings, [] if keep else None
        logprobs, sums, entropies = _forward(blocks, labels, settings, means, ctx.blocks)
        if learns:
            ctx.save_for_backward(hidden, weight, bias, labels, logprobs, sums, entropies, means)
        if not settings.entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, logprobs, sums, entropies, means = ctx.saved_tensors
        settings: _LogitSettings = ctx.settings
        grad = torch.zeros_like(logprobs) if grad is None else grad.to(settings.total)
        # The log-prob of a label that cannot be sampled is -inf and has no gradient.
        picked = grad.masked_fill(torch.isneginf(logprobs), 0.0) / settings.temperature
        if means is not None and grad_entropy is None:
            by_hidden = weight[labels].to(settings.total).mul_(picked[:, None])
            by_hidden.addcmul_(means, grad[:, None], value=-1.0 / settings.temperature)
            return by_hidden.to(hidden.dtype), None, None, None, None
        if settings.softcap is not None:
            capped = (logprobs + sums) * (settings.temperature / settings.softcap)
            picked *= torch.where(torch.isneginf(logprobs), 0.0, 1.0 - capped * capped)
        stored, ctx.blocks = ctx.blocks, None  # overwritten below: a second backward pass recomputes them
        operand = settings.operand(hidden)
        blocks = stored or _blocks(operand, weight, bias, settings, fresh=False)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        by_hidden, by_weight, by_bias = _backward(
            blocks,
            settings,
            operand,
            sums,
            entropies,
            grad,
            grad_entropy if settings.entropy else None,
            wants_hidden=wants_hidden,
            weight=weight if wants_weight else None,
            bias=bias if wants_bias else None,
        )
        if by_hidden is not None:
            by_hidden.addcmul_(weight[labels].to(settings.total), picked[:, None])
            by_hidden = by_hidden.to(hidden.dtype)
        if by_weight is not None:
            by_weight.index_add_(0, labels, (hidden.to(settings.total) * picked[:, None]).to(weight.dtype))
        if by_bias is not None:
            by_bias.index_add_(0, labels, picked.to(by_bias.dtype))
        return by_hidden, by_weight, by_bias, None, None


def _forward(
    blocks: Iterable[_Block],
    labels: torch.Tensor,
    settings: _LogitSettings,
    means: torch.Tensor | None,
    stored: list[_Block] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, log-sum-exps and entropies by token, [n] each.

    Args:
        means: Zeros, [n, H], which become sum_j p_j weight_j. None: they are not computed.
        stored: Gets the blocks, which are then kept. None: they are overwritten.
    """
    most = torch.full((len(labels),), MASKED_LOGIT, dtype=settings.total, device=labels.device)
    total, spread, chosen = torch.zeros_like(most), torch.zeros_like(most), torch.full_like(most, MASKED_LOGIT)
    for block in blocks:
        here, logits = block.tokens, block.logits
        at = labels[here] - block.ids.start
        inside = (at >= 0) & (at < logits.shape[1])
        at = at.clamp(0, logits.shape[1] - 1)
        chosen[here] = torch.where(inside, logits.gather(1, at[:, None])[:, 0], chosen[here])
        peak = torch.maximum(most[here], logits.amax(1))
        fall = most[here] - peak
        shrink = fall.exp()
        if stored is not None:
            stored.append(block)
            logits = logits - peak[:, None]
        else:
            logits.sub_(peak[:, None])
        if settings.entropy:
            weights = logits.exp()
            # spread: sum of exp(z - peak) (z - peak)
            spread[here] = (spread[here] + total[here] * fall) * shrink + torch.linalg.vecdot(weights, logits)
        else:
            weights = logits.exp_()
        total[here] = total[here] * shrink + weights.sum(1)
        if means is not None:
            means[here] *= shrink[:, None]
            _add_product(means[here], weights, block.weight)
        most[here] = peak
    logs = total.log()
    logprobs = chosen - most - logs
    if means is not None:
        means /= total[:, None]
    logprobs = torch.where(chosen > MASKED_LOGIT / 2, logprobs, torch.where(chosen.isnan(), chosen, -torch.inf))
    return logprobs, most + logs, logs - spread / total


def _add_product(into: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """into += one @ other; the product in `other`'s dtype."""
    if into.dtype == other.dtype:
        into.addmm_(one, other)
    else:
        into.add_(torch.mm(one.to(other.dtype), other))


def _backward(
    blocks: Iterable[_Block],
    settings: _LogitSettings,
    hidden: torch.Tensor,
    sums: torch.Tensor,
    entropies: torch.Tensor,
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    *,
    wants_hidden: bool,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden states (in the dtype of the sums), weights and bias, without the terms of the labels
    themselves. None for those that are not wanted.

    Without entropy the gradient of z is -grad p, so `grad` is factored out of the matrix products. `hidden`, [n, H], is
    that of `_LogitSettings.operand`; the other inputs are by token, [n].
    """
    outside = (grad if grad_entropy is None else torch.ones_like(grad)) / settings.temperature
    # Hidden states that are already divided by the temperature contain that factor once.
    right = hidden * (outside * settings.temperature if settings.scales_hidden else outside)[:, None].to(hidden.dtype)
    by_hidden = torch.zeros(hidden.shape, dtype=settings.total, device=hidden.device) if wants_hidden else None
    by_weight = None if weight is None else torch.empty_like(weight)
    by_bias = None if bias is None else torch.zeros_like(bias)
    for ids, group in groupby(blocks, key=lambda block: block.ids):
        summed = torch.zeros((ids.stop - ids.start, hidden.shape[1]), dtype=settings.total, device=hidden.device)
        for block in group:
            # p, or with entropy p (grad + grad_entropy (z - lse + entropy)); overwrites the block's logits
            here, gradients = block.tokens, block.logits.sub_(sums[block.tokens, None])
            if grad_entropy is None:
                gradients.exp_()
            else:
                chances = gradients.exp()
                gradients.add_(entropies[here, None]).mul_(grad_entropy[here, None].to(gradients.dtype))
                gradients.add_(grad[here, None]).mul_(chances)
            if block.slope is not None:
                gradients.mul_(block.slope)
            if by_hidden is not None:
                _add_product(by_hidden[here], gradients, block.weight)
            if by_weight is not None:
                _add_product(summed, gradients.t(), right[here])
            if by_bias is not None:
                by_bias[ids] -= (gradients.t() @ outside[here]).to(by_bias.dtype)
        if by_weight is not None:
            torch.neg(summed, out=summed)
            by_weight[ids] = summed
    if by_weight is not None:
        by_weight[settings.vocab :] = 0.0
    if by_hidden is not None:
        by_hidden.mul_(-outside[:, None])
    return by_hidden, by_weight, by_bias
