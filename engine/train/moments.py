"""AdamW's state and torch's random state as tensors by name, for checkpoints: moments are sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.train.optimizers import plain_moment, set_moment
from engine.train.tensor_files import read_tensors, stored_names

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup

RANDOM = "torch_rng"
"""Name of the random state of process 0; that of process 1 is `torch_rng.1`, and so on."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """This process's moments and step counts by `<parameter>::exp_avg` and so on.

    Moments have the shapes of their parameters; step counts are scalars. Moments of 8 bits are returned as float32.
    """
    return {
        f"{name}::{key}": plain_moment(torch.as_tensor(value))
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_moments(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    process_group: ProcessGroup,
) -> None:
    """Read what `moments` returned, from a folder of `write_tensors`. Other tensors of the folder are not read.

    Raises:
        ValueError: the state belongs to other parameters.
    """
    found: dict[str, torch.Tensor] = {}
    for key, shape in stored_names(folder).items():
        name, _, moment = key.rpartition("::")
        if moment not in (*_MOMENTS, "step"):
            continue
        parameter = parameters.get(name)
        if parameter is None or (moment in _MOMENTS and shape != parameter.shape):
            raise ValueError(f"the optimizer's state `{key}` {shape} belongs to no trained parameter")
        found[key] = torch.zeros_like(parameter.detach()) if moment in _MOMENTS else torch.zeros(shape)
    read_tensors(found, folder, process_group)
    for key, value in found.items():
        name, _, moment = key.rpartition("::")
        set_moment(optimizer, parameters[name], moment, value)


def random_state(process_group: ProcessGroup) -> dict[str, torch.Tensor]:
    """This process's random state, uint8 [bytes]."""
    return {_random_name(process_group): torch.get_rng_state()}


def load_random_state(folder: Path, process_group: ProcessGroup) -> None:
    """Read what `random_state` returned; in a process that had none, that of process 0."""
    stored, name = stored_names(folder), _random_name(process_group)
    name = name if name in stored else RANDOM
    state = torch.zeros(stored[name], dtype=torch.uint8)
    read_tensors({name: state}, folder, process_group)
    torch.set_rng_state(state)


def _random_name(process_group: ProcessGroup) -> str:
    return RANDOM if process_group.main else f"{RANDOM}.{process_group.rank}"
