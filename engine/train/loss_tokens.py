"""The trained tokens of a micro-batch as flat tensors: the input of losses, KL penalty and rollout correction.

Invariant: a micro-batch holds whole rows, so means over a turn or a row can be computed within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.train.loss_columns import LossColumns
    from engine.train.packing import Pack


class LossTokens(Struct, frozen=True, eq=False, kw_only=True):
    """Tensors [n] for n trained tokens, ordered by row, on one device.

    All log-probs are those of the sampled token at the sampler's temperature, in nats.

        tokens = LossTokens(logprobs=l, proximal=l.detach(), sampler=s, advantages=a, loss_weights=w, rows=r, turns=t)
        loss, tally = objective(spec, tokens)
        loss.backward()
    """

    logprobs: Tensor
    """Log-probs of the current policy, with their graph."""
    proximal: Tensor
    """Log-probs in the denominator of the clipped ratio: the trainer's before the batch's first update, or the
    sampler's."""
    sampler: Tensor
    """Log-probs of the sampler (the behaviour policy)."""
    advantages: Tensor
    loss_weights: Tensor
    """Factor of each token in the loss of the step (`engine.train.loss_columns`)."""
    rows: Tensor
    """int64: number of the token's row."""
    turns: Tensor
    """int64: number of the token's turn; turns of different rows have different numbers."""
    reference: Tensor | None = None
    """Log-probs of the reference model; needed for `kl`."""
    entropy: Tensor | None = None
    """Entropy of the current policy's distribution at the token, in nats, with its graph; needed for
    `entropy_coefficient`."""

    @classmethod
    def of(
        cls,
        pack: Pack,
        columns: Sequence[LossColumns],
        logprobs: Tensor,
        *,
        entropy: Tensor | None = None,
        reference: Tensor | None = None,
        sampler_is_proximal: bool = False,
    ) -> LossTokens:
        """The tokens of a pack after its forward pass.

        Args:
            pack: Whole rows.
            columns: Those of the rows that the pack refers to by their numbers.
            logprobs: Those of the current policy, [n].
            entropy: Those of its distributions, [n].
            reference: Log-probs of the reference model, [n].
            sampler_is_proximal: Without `proximal` columns, the proximal log-probs are the sampler's, not the current
                ones.
        """
        packed = [columns[number] for number in pack.rows]
        device = logprobs.device
        turns = _flat((of_row.row.branch.turn_ids[of_row.row.places] for of_row in packed), device, torch.int64)
        rows = torch.as_tensor(pack.row.cpu().numpy(), dtype=torch.int64).to(device)
        sampler = _flat((of_row.row.branch.logprobs[of_row.row.places] for of_row in packed), device)
        recomputed = [of_row.proximal for of_row in packed if of_row.proximal is not None]
        proximal = _flat(recomputed, device) if recomputed else sampler if sampler_is_proximal else logprobs.detach()
        return cls(
            logprobs=logprobs,
            proximal=proximal,
            sampler=sampler,
            advantages=_flat((of_row.advantages for of_row in packed), device),
            loss_weights=_flat((of_row.weights for of_row in packed), device),
            rows=rows,
            turns=rows * (int(turns.max()) + 1 if len(turns) else 1) + turns,
            reference=reference,
            entropy=entropy,
        )


def _flat(of_rows: Iterable[np.ndarray], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = list(of_rows)
    return torch.as_tensor(np.concatenate(parts) if parts else np.zeros(0), dtype=dtype).to(device)
