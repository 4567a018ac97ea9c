"""Gathers what the loss of a pack's tokens needs: one forward pass, and columns of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.train.critic_update import value_tokens
from engine.train.packing import Pack
from engine.train.tokens import Tokens

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.store.rows.export import Row
    from engine.train.critic import Critic
    from engine.train.policy import Policy


def gather_tokens(
    pack: Pack,
    rows: Sequence[Row],
    loss_weights: Sequence[np.ndarray],
    policy: Policy,
    critic: Critic | None,
    spec: TrainSpec,
) -> Tokens:
    """Run the forward pass of a pack and gather the tensors that the loss of its tokens needs.

    Args:
        pack: Whole rows.
        rows: The rows that packs refer to by their numbers.
        loss_weights: For each row, float64 [trained tokens].
        policy: The model.
        critic: The critic, if it is trained by the same pass.
        spec: The `train:` section.

    Returns:
        Tensors over the trained tokens of the pack.
    """
    values: torch.Tensor | None = None
    if critic is not None and critic.reads_policy:
        logprobs, entropy, values = policy.forward_with_values(pack, critic.head, entropy=True)
    else:
        logprobs, entropy = policy.forward(pack, entropy=True)
        values = critic.values(pack) if critic is not None else None
    reference = policy.reference(pack) if spec.kl.in_loss else None
    device = logprobs.device
    numbers = pack.row.cpu().numpy()
    held = list(dict.fromkeys(numbers.tolist()))

    def flat(of: Iterable[Any], dtype: torch.dtype) -> torch.Tensor:
        parts = [np.asarray(each) for each in of]
        whole = np.concatenate(parts) if parts else np.zeros(0)
        return torch.as_tensor(whole, dtype=dtype).to(device)

    def column(name: str) -> torch.Tensor:
        return flat((rows[number][name][trained_places(rows[number])] for number in held), torch.float32)

    turns = flat((rows[number]["turn_ids"][trained_places(rows[number])] for number in held), torch.int64)
    row = torch.as_tensor(numbers, dtype=torch.int64).to(device)
    sampler = column("logprobs")
    if "proximal" in (rows[0] if rows else {}):
        proximal = flat((rows[number]["proximal"] for number in held), torch.float32)
    else:
        proximal = sampler if spec.proximal_logprobs == "sampler" else logprobs.detach()
    return Tokens(
        logprobs=logprobs,
        proximal=proximal,
        sampler=sampler,
        advantages=column("advantages"),
        loss_weights=flat((loss_weights[number] for number in held), torch.float32),
        rows=row,
        turns=row * (int(turns.max()) + 1 if len(turns) else 1) + turns,
        reference=reference,
        entropy=entropy,
        valued=None if values is None else value_tokens(values, pack, rows),
    )


def trained_places(row: Row) -> np.ndarray:
    """Return the indices of the sampled tokens of a row, int64 [trained tokens]."""
    return np.flatnonzero(row["loss_mask"] == 1)
