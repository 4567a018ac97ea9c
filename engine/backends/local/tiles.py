"""Forward passes of one fixed shape, so that a token's logits are the same bits whatever is computed beside it.

A matrix product may add in another order when it has another number of rows, and masked attention over a longer stretch
likewise: differences of 1e-6 in float32, which once in many thousand tokens change a sampled id. Here every pass holds
exactly `TILE` tokens, filled up with tokens of a row that nobody reads, and each token attends alone, to exactly its own
sequence. What a token gives then depends on its place in the tile at most; that it does not is proved when the model is
loaded (`PackedModel.prove_repeatable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

TILE = 16
"""Tokens of a pass. More cost short batches more, fewer cost long ones more."""


class Tile:
    """What one pass computes: `TILE` tokens, each with its row and position."""

    def __init__(self, tokens: Sequence[tuple[int, int, int]], spare: int, device: torch.device) -> None:
        """
        Args:
            tokens: Id, row and position of each; a row's in order, all of its earlier ones in the cache or before it here.
            spare: The row that fills the tile up.
            device: Where the model is.
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
        """Each token's attention over its own sequence.

        Args:
            query: [kv_heads, queries of one key head, TILE, width].
            keys: The layer's, [rows, kv_heads, capacity, width]; the tile's own are in.
            values: Likewise.
            scaling: Factor of the scores; 1 / sqrt(width) when None.
            window: How many positions a token sees, itself included; None: all.

        Returns:
            [TILE, kv_heads, queries of one key head, value width]; zeros for what fills the tile up.
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


def tiles(tokens: Sequence[tuple[int, int, int]], spare: int, device: torch.device) -> Iterator[Tile]:
    """All tokens of a pass, `TILE` at a time and in order."""
    for start in range(0, len(tokens), TILE):
        yield Tile(tokens[start : start + TILE], spare, device)
