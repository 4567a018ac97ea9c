"""Updates of the critic alone: the passes of `critic.update_epochs` beyond those of the policy.

Invariant: such an update moves the critic's own weights only, and does not depend on how its rows are split into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.errors import TrainError
from engine.train.credited_rows import value_weights
from engine.train.loss_columns import LossColumns
from engine.train.loss_tokens import ValueTokens
from engine.train.metric_sums import MetricSums
from engine.train.value_loss import value_objective

if TYPE_CHECKING:
    from engine.train.critic import Critic
    from engine.train.distributed import ProcessGroup
    from engine.train.packing import Pack
    from engine.train.policy import Policy


def with_value_weights(columns: Sequence[LossColumns]) -> list[LossColumns]:
    """The columns of a mini-batch with `value_weights`."""
    return [
        replace(of_row, extra={**of_row.extra, "value_weights": weights})
        for of_row, weights in zip(columns, value_weights(columns), strict=True)
    ]


def value_tokens(values: torch.Tensor, pack: Pack, columns: Sequence[LossColumns]) -> ValueTokens:
    """What the value loss of a pack needs.

    Args:
        values: The critic's values before the pack's trained tokens, [n], with their graph.
        pack: The pack.
        columns: Those of the mini-batch, with `values`, `returns` and `value_weights`.
    """
    numbers = list(dict.fromkeys(pack.row.tolist()))

    def column(name: str) -> torch.Tensor:
        flat = np.concatenate([columns[number].extra[name] for number in numbers]) if numbers else np.zeros(0)
        return torch.as_tensor(flat, dtype=torch.float32).to(values.device)

    return ValueTokens(values, column("values"), column("returns"), column("value_weights"))


def update_critic(
    critic: Critic,
    policy: Policy,
    columns: Sequence[LossColumns],
    packs: Sequence[tuple[Pack, bool]],
    process_group: ProcessGroup,
) -> dict[str, float]:
    """Make one optimizer step of the critic. Returns its metrics.

    Args:
        critic: The critic; its gradients are None before and after.
        policy: The policy, which does not change.
        columns: The mini-batch, as `with_value_weights` returns it.
        packs: This process's packs of the rows, each with False if its loss does not count.
        process_group: The processes of the training.

    Raises:
        TrainError: kind `diverged`: the loss or the gradient norm is not finite; no weight was changed.
    """
    loss, metrics = 0.0, MetricSums()
    for pack, counts in packs:
        tokens = value_tokens(critic.own_values(pack, policy), pack, columns)
        part, counted = value_objective(critic.spec, tokens)
        factor = critic.spec.loss_factor if counts else 0.0
        (factor * part).backward()  # type: ignore[no-untyped-call]
        if counts:
            loss += float(part.detach())
            metrics.merge(counted)
    if process_group.size > 1:
        parts, metrics = process_group.all_gather((loss, metrics.cpu())), MetricSums()
        loss = sum(part for part, _ in parts)
        for _, counted in parts:
            metrics.merge(counted)
    norm = critic.clip_gradients()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        critic.optimizer.zero_grad(set_to_none=True)
        raise TrainError(
            f"the critic's loss is {loss} and its gradient's norm {norm}: the update was not applied. Lower `train.critic.lr` or "
            "`train.critic.update_epochs`, or look at critic/loss in metrics.jsonl",
            kind="diverged",
        )
    critic.update()
    critic.optimizer.zero_grad(set_to_none=True)
    return metrics.result() | {"critic/grad_norm": norm}
