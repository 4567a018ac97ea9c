"""Gathers what the loss of a pack's tokens needs: one forward pass, and the columns of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.train.critic_update import value_tokens
from engine.train.loss_tokens import Tokens
from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.train.critic import Critic
    from engine.train.loss_columns import LossColumns
    from engine.train.policy import Policy


def gather_tokens(
    pack: Pack,
    columns: Sequence[LossColumns],
    policy: Policy,
    critic: Critic | None,
    spec: TrainSpec,
) -> Tokens:
    """Run the forward pass of a pack and gather the tensors that the loss of its tokens needs.

    Args:
        pack: Whole rows.
        columns: Those of the rows that packs refer to by their numbers.
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
    packed = [columns[number] for number in dict.fromkeys(numbers.tolist())]

    def flat(values: Iterable[np.ndarray], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        parts = list(values)
        return torch.as_tensor(np.concatenate(parts) if parts else np.zeros(0), dtype=dtype).to(device)

    turns = flat((of_row.row.branch.turn_ids[of_row.row.places] for of_row in packed), torch.int64)
    row = torch.as_tensor(numbers, dtype=torch.int64).to(device)
    sampler = flat(of_row.row.branch.logprobs[of_row.row.places] for of_row in packed)
    before = [of_row.proximal for of_row in packed if of_row.proximal is not None]
    current = sampler if spec.proximal_logprobs == "sampler" else logprobs.detach()
    return Tokens(
        logprobs=logprobs,
        proximal=flat(before) if before else current,
        sampler=sampler,
        advantages=flat(of_row.advantages for of_row in packed),
        loss_weights=flat(of_row.weights for of_row in packed),
        rows=row,
        turns=row * (int(turns.max()) + 1 if len(turns) else 1) + turns,
        reference=reference,
        entropy=entropy,
        valued=None if values is None else value_tokens(values, pack, columns),
    )
