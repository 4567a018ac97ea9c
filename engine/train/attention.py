"""Attention over packs: each token attends to its segment's ancestors and to its own segment up to itself.

Two ways, the same numbers:

- *Parts* (CPU): a segment's keys are read by its own queries, causally, and by the queries of all that descends from
  it, wholly. Those are one range, so every part is an attention of two slices, without mask and without copies; parts
  of one query are joined by their log-sum-exps, as in FlashAttention (arXiv 2205.14135, algorithm 1). The backward
  pass of a part with the joined output and log-sum-exp is the exact gradient by that part.
- *Paths* (elsewhere, and with sliding windows): for each segment, its queries against its ancestors' keys and its own.

Invariant: no mask is larger than one segment's tokens times its row's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import TrainError
from engine.train.packing import Pack, Segment

ATTENTION = "episode_engine_packs"
"""The name that this attention has in transformers' registry."""

_part_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_part_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register() -> None:
    """Make it known to transformers as `ATTENTION`; models then get no mask made for them."""
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
    """transformers' attention interface.

    Args:
        module: The attention layer.
        query: [1, heads, T, width]; `key` and `value` [1, kv_heads, T, width].
        attention_mask: None: the pack says who attends to whom.
        scaling: Of the scores; 1 / sqrt(width) when None.
        dropout: Must be 0.
        sliding_window: Positions that a token sees, itself included; None: all.
        pack: Handed to the model's forward pass as a keyword, and by it to its layers.
        kwargs: What else the model gives.

    Returns:
        [1, T, heads, value_width], and no weights.

    Raises:
        TrainError: The model wants something else of its attention.
    """
    if pack is None:
        raise TrainError("it does not hand its keyword arguments on to its attention", kind="train_setup")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    odd += ["dropout"] if dropout else []
    odd += ["an attention mask"] if attention_mask is not None else []
    odd += ["an order that is not causal"] if not kwargs.get("is_causal", getattr(module, "is_causal", True)) else []
    if odd:
        raise TrainError(f"its attention has {odd[0]}", kind="train_setup")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if sliding_window is not None and sliding_window >= pack.longest:
        sliding_window = None
    heads, tokens = query.shape[1:3]
    # The queries that weight a key head are handed over as that head's several queries: nothing is repeated.
    grouped = query[0].view(key.shape[1], heads // key.shape[1], tokens, query.shape[-1])
    if query.device.type == "cpu" and sliding_window is None and query.shape[-1] == value.shape[-1]:
        # In bfloat16 this kernel's backward pass is several times slower on short segments, and less exact.
        wide = torch.promote_types(query.dtype, torch.float32)
        states = (grouped.to(wide), key[0].to(wide), value[0].to(wide))
        out: torch.Tensor = _Parts.apply(*states, pack.segments, scaling).to(query.dtype)  # type: ignore[no-untyped-call]
    else:
        out = _paths(grouped, key[0], value[0], pack, sliding_window, scaling)
    return out.reshape(1, tokens, heads, -1), None


class _Part(NamedTuple):
    """Queries of one range against keys of one segment."""

    queries: slice
    keys: slice
    causal: bool


def _parts(segments: tuple[Segment, ...]) -> Iterator[_Part]:
    """Every query's own part comes first."""
    for segment in segments:
        own = slice(segment.start, segment.end)
        yield _Part(own, own, True)
    for segment in segments:
        if segment.subtree_end > segment.end:
            yield _Part(slice(segment.end, segment.subtree_end), slice(segment.start, segment.end), False)


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
        keys, values = (found[:, None].expand(-1, group, -1, -1) for found in (key, value))
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
            # Joined: softmax-weighted mean of the parts, by how much weight each has.
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
        keys, values = (found[:, None].expand(-1, group, -1, -1) for found in (key, value))
        grad, out = grad.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        by_query, by_key, by_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for here, there, causal in _parts(ctx.segments):
            found = _part_backward(
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
                by_query[:, :, here] = found[0]
                torch.sum(found[1], 1, out=by_key[:, there])
                torch.sum(found[2], 1, out=by_value[:, there])
            else:
                by_query[:, :, here] += found[0]
                by_key[:, there] += found[1].sum(1)
                by_value[:, there] += found[2].sum(1)
        return by_query, by_key, by_value, None, None


def _paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack, window: int | None, scaling: float | None
) -> torch.Tensor:
    """As `_Parts`, segment by segment with torch's own attention."""
    group, found = query.shape[1], []
    for index, segment in enumerate(pack.segments):
        ranges = _ancestors(pack.segments, index)
        keys, values = (
            torch.cat([states[:, start:end] for start, end in ranges], 1)[:, None].expand(-1, group, -1, -1)
            for states in (key, value)
        )
        mask = _mask(pack, index, window, query.device)
        found.append(
            scaled_dot_product_attention(
                query[:, :, segment.start : segment.end],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    return torch.cat(found, 2).permute(2, 0, 1, 3)


def _ancestors(segments: tuple[Segment, ...], index: int) -> list[tuple[int, int]]:
    """The ranges of a segment's ancestors and its own, in order."""
    ranges = []
    while index >= 0:
        ranges.append((segments[index].start, segments[index].end))
        index = segments[index].parent
    return ranges[::-1]


def _mask(pack: Pack, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which of its row's tokens each of a segment's sees: bool [own, before and own]; None: all up to itself."""
    segment = pack.segments[index]
    own, reach = segment.end - segment.start, segment.position + segment.end - segment.start
    if window is None and segment.position == 0:
        return None
    if window is None and device.type == "cuda":
        bias: torch.Tensor = causal_lower_right(own, reach)
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
