"""Attention over packs: each token attends to the ancestors of its segment and to its own segment up to itself.

There are two implementations with the same result:

- *Parts* (CPU): the keys of a segment are used by its own queries (causal attention) and by the queries of all its
  descendants (full attention). Descendants are one contiguous range, so each part is an attention between two slices,
  without mask and copies. The parts of a query are combined by their log-sum-exps, as in FlashAttention (arXiv
  2205.14135, algorithm 1). The backward pass of a part, given the combined output and log-sum-exp, is the exact
  gradient of that part.
- *Paths* (GPU, and sliding windows): for each segment, its queries attend to the keys of its ancestors and its own
  keys.

Invariant: no mask is larger than the tokens of one segment times the tokens of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import TrainError
from engine.train.packing import Pack, Segment

ATTENTION = "episode_engine_packs"
"""The name of this attention in transformers' registry."""

_part_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_part_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register() -> None:
    """Register this attention in transformers as `ATTENTION`. transformers then makes no mask for the models."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    pack: Pack | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a pack, with the signature of transformers' attention interface.

    Args:
        module: The attention layer.
        query: [1, heads, T, width]; `key` and `value` [1, kv_heads, T, width].
        attention_mask: Must be None: the pack defines which tokens attend to which.
        scaling: Factor of the scores; None: 1 / sqrt(width).
        dropout: Must be 0.
        sliding_window: Number of positions that a token attends to, including itself. None: all.
        pack: The pack. The model's forward pass passes this keyword to its layers.
        kwargs: Other arguments of the model.

    Returns:
        [1, T, heads, value_width], and None for the attention weights.

    Raises:
        TrainError: kind `train_setup`: the model needs an attention feature that is not supported.
    """
    if pack is None:
        raise TrainError("it does not pass its keyword arguments to its attention", kind="train_setup")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    odd += ["dropout"] if dropout else []
    odd += ["an attention mask"] if attention_mask is not None else []
    odd += ["an order that is not causal"] if not kwargs.get("is_causal", getattr(module, "is_causal", True)) else []
    if odd:
        raise TrainError(f"its attention uses {odd[0]}, which is not supported", kind="train_setup")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if sliding_window is not None and sliding_window >= pack.longest:
        sliding_window = None
    heads, tokens = query.shape[1:3]
    # Queries that share a key head are grouped by that head, so keys and values are not copied.
    grouped = query[0].view(key.shape[1], heads // key.shape[1], tokens, query.shape[-1])
    if query.device.type == "cpu" and sliding_window is None and query.shape[-1] == value.shape[-1]:
        # In bfloat16 the backward pass of this kernel is several times slower on short segments and less exact.
        wide = torch.promote_types(query.dtype, torch.float32)
        states = (grouped.to(wide), key[0].to(wide), value[0].to(wide))
        out: torch.Tensor = _Parts.apply(*states, pack.segments, scaling).to(query.dtype)  # type: ignore[no-untyped-call]
    else:
        out = _paths(grouped, key[0], value[0], pack, sliding_window, scaling)
    return out.reshape(1, tokens, heads, -1), None


def _parts(segments: tuple[Segment, ...]) -> Iterator[tuple[slice, slice, bool]]:
    """The parts of a pack: a range of queries, the keys of one segment, and whether attention between them is causal.

    The part of each segment with itself comes first.
    """
    for segment in segments:
        span = slice(segment.start, segment.end)
        yield span, span, True
    for segment in segments:
        if segment.subtree_end > segment.end:
            yield slice(segment.end, segment.subtree_end), slice(segment.start, segment.end), False


class _Parts(torch.autograd.Function):
    """Grouped queries [kv_heads, group, T, width], keys and values [kv_heads, T, width] -> [T, kv_heads, group, width];
    float32 or float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[Segment, ...],
        scaling: float | None,
    ) -> torch.Tensor:
        kv_heads, group, tokens, width = query.shape
        keys, values = (states[:, None].expand(-1, group, -1, -1) for states in (key, value))
        out = query.new_empty((tokens, kv_heads, group, width))
        view = out.permute(1, 2, 0, 3)
        sums = query.new_empty((tokens, kv_heads, group)).permute(1, 2, 0)
        for here, there, causal in _parts(segments):
            part, part_sums = _part_forward(
                query[:, :, here], keys[:, :, there], values[:, :, there], 0.0, causal, scale=scaling
            )
            if causal:
                view[:, :, here], sums[:, :, here] = part, part_sums
                continue
            # Combine the parts: mean weighted by the sums of their exponentials.
            weight = torch.sigmoid(part_sums - sums[:, :, here])[..., None]
            view[:, :, here].lerp_(part, weight)
            sums[:, :, here] = torch.logaddexp(sums[:, :, here], part_sums)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.segments, ctx.scaling = segments, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        group = query.shape[1]
        keys, values = (states[:, None].expand(-1, group, -1, -1) for states in (key, value))
        grad, out = grad.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        by_query, by_key, by_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for here, there, causal in _parts(ctx.segments):
            gradients = _part_backward(
                grad[:, :, here],
                query[:, :, here],
                keys[:, :, there],
                values[:, :, there],
                out[:, :, here],
                sums[:, :, here],
                0.0,
                causal,
                scale=ctx.scaling,
            )
            if causal:
                by_query[:, :, here] = gradients[0]
                torch.sum(gradients[1], 1, out=by_key[:, there])
                torch.sum(gradients[2], 1, out=by_value[:, there])
            else:
                by_query[:, :, here] += gradients[0]
                by_key[:, there] += gradients[1].sum(1)
                by_value[:, there] += gradients[2].sum(1)
        return by_query, by_key, by_value, None, None


def _paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack, window: int | None, scaling: float | None
) -> torch.Tensor:
    """The same result as `_Parts`, computed segment by segment with torch's attention."""
    group, outputs = query.shape[1], []
    for index, segment in enumerate(pack.segments):
        ancestors = [segment]
        while ancestors[0].parent >= 0:
            ancestors.insert(0, pack.segments[ancestors[0].parent])
        keys, values = (
            torch.cat([states[:, part.start : part.end] for part in ancestors], 1)[:, None].expand(-1, group, -1, -1)
            for states in (key, value)
        )
        mask = _mask(pack, index, window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, segment.start : segment.end],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    return torch.cat(outputs, 2).permute(2, 0, 1, 3)


def _mask(pack: Pack, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Mask of a segment: bool [tokens of the segment, tokens of its row up to its end]. None: plain causal
    attention."""
    segment = pack.segments[index]
    size, reach = segment.end - segment.start, segment.position + segment.end - segment.start
    if window is None and segment.position == 0:
        return None
    if window is None and device.type == "cuda":
        bias: torch.Tensor = causal_lower_right(size, reach)
        return bias
    name = ("mask", index, window, str(device))
    if name not in pack.cache:
        at = torch.arange(reach, device=device)
        seen = at <= at[segment.position :, None]
        if window is not None:
            seen &= at > at[segment.position :, None] - window
        pack.cache[name] = seen
    mask: torch.Tensor = pack.cache[name]
    return mask
