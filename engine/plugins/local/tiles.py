"""Forward passes of one fixed shape, so that a token's logits are bit-identical in every batch.

The order of additions in a matrix product may depend on its number of rows, and in masked attention on its length. The
differences are 1e-6 in float32, and once in many thousand tokens they change a sampled id. Here every pass has exactly
`TILE` tokens, padded with tokens of a row that is never read, and attention is computed for each token separately, over
exactly its own sequence. A token's logits could then depend only on its place in the tile; that they do not is checked
when the model is loaded (`PackedModel._check_repeatable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

TILE = 16
"""Number of tokens in a pass. A larger value makes small batches slower, a smaller value makes large batches slower."""


class Tile:
    """Layout of one pass: `TILE` tokens, each with its row and position."""

    def __init__(self, tokens: Sequence[tuple[int, int, int]], spare: int, device: torch.device) -> None:
        """
        Args:
            tokens: (id, row, position) of each token. Tokens of a row are in order; its earlier ones are in the cache or here.
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


def tiles(tokens: Sequence[tuple[int, int, int]], spare: int, device: torch.device) -> Iterator[Tile]:
    """Split the tokens of a pass into tiles, in order."""
    for start in range(0, len(tokens), TILE):
        yield Tile(tokens[start : start + TILE], spare, device)
