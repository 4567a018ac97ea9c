"""Key/value cache of many sequences, and attention over it.

A row holds one sequence, and its token p is at position p, so there is no left padding. Rows are never moved: a forward
pass takes any set of rows, packed into one sequence of tokens, and a decode step writes one token per row without
copying the others.

Invariant: values beyond a row's length are finite (zeros, or an older sequence), so that masked attention over
them is exact.

With `deterministic`, passes have one fixed shape, so that a token's logits are bit-identical in every batch. The order
of additions in a matrix product may depend on its number of rows, and in masked attention on its length. The
differences are 1e-6 in float32, and once in many thousand tokens they change a sampled id. So every pass then has
exactly `TILE` tokens, padded with tokens of a row that is never read, and attention is computed for each token
separately, over exactly its own sequence. A token's logits could then depend only on its place in the tile; that they
do not is checked when the model is loaded (`PackedModel._check_repeatable`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from engine.errors import BackendError
from engine.schemas.base import Struct

ATTENTION = "episode_engine_rows"
"""Name of this attention in transformers' registry."""
GROWTH = 256
"""Minimum number of positions by which the cache grows."""
TILE = 16
"""Number of tokens in a pass. A larger value makes small batches slower, a smaller value makes large batches slower."""
ALIGN = 16
"""Attention reads a multiple of this many positions, because masked kernels need aligned rows."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt, in order."""

    ids: np.ndarray
    """The prompt, int32 [tokens]."""
    marked: np.ndarray
    """The prompt with a negative number in place of each placeholder, one number for each different image, int32
    [tokens]. Prompts with equal beginnings here show equal images there."""
    digests: list[str]
    spans: list[tuple[int, int]]
    """The tokens [start, end) of each image."""
    positions: torch.Tensor | None = None
    """Position ids of the prompt, int64 [axes, tokens]; computed by the model at the first pass."""

    def whole(self, length: int) -> int:
        """The largest part of the first `length` tokens that ends in no image."""
        return next((start for start, end in self.spans if start < length < end), length)

    def end(self, start: int) -> int:
        """The end of the image that begins at token `start`; `start` if there is none."""
        return next((end for begin, end in self.spans if begin == start), start)

    def within(self, start: int, end: int) -> list[str]:
        """The images that begin at the tokens [start, end)."""
        return [digest for digest, (begin, _) in zip(self.digests, self.spans, strict=True) if start <= begin < end]


class RowChunk(Struct, frozen=True, kw_only=True):
    """Tokens of one row in a forward pass."""

    row: int
    ids: Sequence[int]
    past: int
    """Number of tokens of the row that are in the cache; the place of `ids[0]`."""
    images: PromptImages | None = None
    """The images of the row's prompt."""


Stash = dict[str, torch.Tensor]
"""A sequence outside the cache, by the names of `KVRows.tensors`: each [layers, heads, length, width]."""


@dataclass(eq=False)
class KVRows:
    """The cache, allocated at the first write. It is never smaller than `GROWTH` positions a row."""

    layers: int
    row_count: int
    capacity: int = GROWTH
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """`keys` and `values`, and `experts` (int16, one head) where a model has some and they are written: each
    [layers, rows, heads, capacity, width]."""

    @property
    def bytes(self) -> int:
        """Memory in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def reserve(self, length: int) -> None:
        """Enlarge the cache for rows of `length` tokens. It grows by at least half, so that it rarely grows."""
        if length <= self.capacity:
            return
        self.capacity = -(-max(length, self.capacity * 3 // 2) // GROWTH) * GROWTH
        for name, old in self.tensors.items():
            self.tensors[name] = old.new_zeros((*old.shape[:3], self.capacity, old.shape[4]))
            self.tensors[name][:, :, :, : old.shape[3]] = old

    def write(self, name: str, layer: int, states: torch.Tensor, plan: Plan | Tile) -> None:
        """Store what one layer computed in a forward pass, [tokens, heads, width]."""
        if name not in self.tensors:
            shape = (self.layers, self.row_count, states.shape[1], self.capacity, states.shape[2])
            self.tensors[name] = states.new_zeros(shape)
        self.tensors[name][layer][plan.rows, :, plan.positions] = states

    def experts_of(self, row: int, start: int, end: int) -> torch.Tensor:
        """The experts of a row's tokens [start, end), int16 [tokens, layers, top_k]; zeros in layers without
        experts."""
        return self.tensors["experts"][:, row, 0, start:end].transpose(0, 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        for tensor in self.tensors.values():
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def take(self, row: int, length: int) -> Stash:
        """Copy a row's first `length` tokens to a stash, [layers, heads, length, width] each."""
        return {name: tensor[:, row, :, :length].clone() for name, tensor in self.tensors.items()}

    def put(self, row: int, stash: Stash, length: int) -> None:
        """Copy the first `length` tokens of a stash, [layers, heads, its length, width] each, to a row. Call `reserve`
        first."""
        for name, states in stash.items():
            self.tensors[name][:, row, :, :length] = states[:, :, :length]


@dataclass(slots=True)
class _Part:
    """Tokens [start, start + count) of a pass: one new token of each of `count` rows, or `count` of one row."""

    row: int
    """The only row, or the first of neighbouring ones."""
    start: int
    places: torch.Tensor
    """[count]: the place of each token in its row."""
    reach: int
    """Number of positions that attention reads."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[count, reach]: 0 where each token attends, -inf elsewhere; computed once for all layers."""
        if window not in self.masks:
            at, own = torch.arange(self.reach, device=self.places.device), self.places[:, None]
            seen = at <= own if window is None else (at <= own) & (at > own - window)
            zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window] = zeros.masked_fill_(~seen, float("-inf"))
        return self.masks[window]


class Plan:
    """Layout of one forward pass: each token's row and position, and the positions that it attends to."""

    def __init__(self, chunks: Sequence[RowChunk], device: torch.device) -> None:
        """`chunks`: first those of one token, ordered by row; then the longer ones."""
        rows = [chunk.row for chunk in chunks for _ in chunk.ids]
        positions = [chunk.past + offset for chunk in chunks for offset in range(len(chunk.ids))]
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self.decodes: list[_Part] = []
        """Of neighbouring rows, each with one new token."""
        self.extends: list[_Part] = []
        """Of one row each."""
        singles = [chunk for chunk in chunks if len(chunk.ids) == 1]
        start = 0
        # neighbouring rows are one slice of the cache
        for _, neighbours in groupby(enumerate(singles), key=lambda numbered: numbered[1].row - numbered[0]):
            run = [chunk for _, chunk in neighbours]
            places = self.positions[start : start + len(run)]
            reach = max(chunk.past for chunk in run) + 1
            self.decodes.append(_Part(run[0].row, start, places, -(-reach // ALIGN) * ALIGN))
            start += len(run)
        for chunk in chunks[len(singles) :]:
            places = self.positions[start : start + len(chunk.ids)]
            self.extends.append(_Part(chunk.row, start, places, chunk.past + len(chunk.ids)))
            start += len(chunk.ids)


class Tile:
    """Layout of one pass: `TILE` tokens, each with its row and position."""

    def __init__(self, tokens: Sequence[tuple[int, int, int]], spare: int, device: torch.device) -> None:
        """
        Args:
            tokens: (id, row, position) of each token. Tokens of a row are in order; its earlier ones are in the cache
                or here.
            spare: The row of the padding tokens.
            device: The device of the model.
        """
        filled = [*tokens, *((0, spare, place) for place in range(TILE - len(tokens)))]
        ids, rows, positions = zip(*filled, strict=True)
        self.count = len(tokens)
        self.ids = torch.tensor(ids, device=device)
        self.rows = torch.tensor(rows, device=device)
        self.positions = torch.tensor(positions, device=device)
        self._places = list(zip(rows, positions, strict=True))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """Compute each token's attention over its own sequence.

        Args:
            query: [kv_heads, queries of one key head, TILE, width].
            keys: The layer's keys, [rows, kv_heads, capacity, width], with those of the tile.
            values: The layer's values, likewise.
            scaling: Factor of the scores; 1 / sqrt(width) when None.
            window: Number of positions that a token attends to, itself included. None: all.

        Returns:
            [TILE, kv_heads, queries of one key head, value width]; zeros for padding.
        """
        out = query.new_zeros((TILE, *query.shape[:2], values.shape[-1]))
        for place, (row, position) in enumerate(self._places[: self.count]):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            out[place] = scaled_dot_product_attention(
                query[None, :, :, place].contiguous(),
                keys[row, None, :, seen].contiguous(),
                values[row, None, :, seen].contiguous(),
                scale=scaling,
            )[0]
        return out


class RowsCache(Cache):  # type: ignore[misc]
    """The cache object for transformers, which passes each layer's new keys and values and never reads them back."""

    def __init__(self, store: KVRows) -> None:
        super().__init__(layers=[])
        self.store = store
        self.plan: Plan | Tile | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values; `attend` reads them from the rows.

        `key_states` and `value_states`: [1, key-value heads, tokens, head_dim]; returned unchanged.
        """
        assert self.plan is not None
        self.store.write("keys", layer_idx, key_states[0].transpose(0, 1), self.plan)
        self.store.write("values", layer_idx, value_states[0].transpose(0, 1), self.plan)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: the caller passes the positions, so the model must not add an offset."""
        return 0

    def __enter__(self) -> RowsCache:
        _active.cache = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.cache = None
        self.plan = None


_active = threading.local()
"""`cache` is the `RowsCache` of the forward pass that this thread computes."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface, over the rows of the active `RowsCache`.

    Args:
        query: [1, heads, tokens, head_dim]; `key` and `value` are in the cache already.

    Returns:
        [1, tokens, heads, value_dim], and None for the attention weights.

    Raises:
        BackendError: called outside of the local backend's forward pass, or the model needs attention that is not
            supported.
    """
    cache: RowsCache | None = getattr(_active, "cache", None)
    if cache is None or cache.plan is None or not cache.store.tensors:
        raise BackendError("this attention works only in the local backend's own forward pass")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        raise BackendError(f"the local backend does not support attention with {odd[0]}", kind="unsupported_model")
    keys, values = (cache.store.tensors[name][module.layer_idx] for name in ("keys", "values"))
    plan, kv_heads = cache.plan, keys.shape[1]
    _, heads, tokens, width = query.shape
    # Queries of one key head are passed as several queries of that head, so keys and values need not be repeated.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, width)
    if isinstance(plan, Tile):
        return plan.attend(grouped, keys, values, scaling, sliding_window).view(1, tokens, heads, -1), None
    out = query.new_empty((tokens, kv_heads, heads // kv_heads, values.shape[-1]))
    for run in plan.decodes:
        count = len(run.places)
        rows, here = slice(run.row, run.row + count), slice(run.start, run.start + count)
        mask = run.mask(sliding_window, query.dtype)[:, None, None].expand(count, 1, heads // kv_heads, run.reach)
        out[here] = scaled_dot_product_attention(
            grouped[:, :, here].permute(2, 0, 1, 3),
            keys[rows, :, : run.reach],
            values[rows, :, : run.reach],
            attn_mask=mask,
            scale=scaling,
        )
    for part in plan.extends:
        here, reach = slice(part.start, part.start + len(part.places)), part.reach
        whole = reach == len(part.places) and sliding_window is None
        shape = (kv_heads, heads // kv_heads, reach, -1)
        attended = scaled_dot_product_attention(
            grouped[:, :, here],
            keys[part.row, :, :reach].unsqueeze(1).expand(shape),
            values[part.row, :, :reach].unsqueeze(1).expand(shape),
            attn_mask=None if whole else part.mask(sliding_window, query.dtype),
            is_causal=whole,
            scale=scaling,
        )
        out[here] = attended.permute(2, 0, 1, 3)
    return out.view(1, tokens, heads, -1), None
