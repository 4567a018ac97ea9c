"""AdamW's state as tensors by name, full tensors of sharded ones, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup

_MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], process_group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """AdamW's moments and step counts by `<parameter>::exp_avg` and so on: full tensors in process 0, {} in the others.

    Moments have the shapes of their parameters; step counts are scalars. Every process must call this.
    """
    told: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            told[f"{name}::{key}"] = torch.as_tensor(value)
    return process_group.gather_full(told)


def load_moments(
    state: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    process_group: ProcessGroup,
) -> None:
    """Load what `moments` returned; tensors of the same shapes. Every process must call this.

    Raises:
        ValueError: the state belongs to other parameters.
    """
    for key, value in state.items():
        name, _, moment = key.rpartition("::")
        parameter = parameters.get(name)
        if parameter is None or (moment in _MOMENTS and value.shape != parameter.shape):
            raise ValueError(f"the optimizer's state `{key}` {tuple(value.shape)} belongs to no trained parameter")
        kept = process_group.shard_like(value, parameter) if moment in _MOMENTS else value
        optimizer.state[parameter][moment] = kept
