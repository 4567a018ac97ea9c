"""A checkpoint -> its named parts: each owner of state that a resumed training needs declares one part, and no part is
skipped.

    parts = {"policy": StatePart(2, tensors, load)}       # folder `policy`, version 2

A checkpoint lists its parts with their versions. A part that a training does not have, or has in another version, is
refused by name. Every process writes and reads its own part of each tensor (`files.py`): moments are sharded as
the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.schemas.base import Struct
from engine.train.files import read_tensors, stored_names
from engine.train.optimizers import plain_moment, set_moment

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup

LENGTH = "loss_length"
"""Name in the optimizer's part of the constant of `dr_grpo` that was measured; 0: not measured yet."""
RANDOM = "torch_rng"
"""Name of the random state of process 0; that of process 1 is `torch_rng.1`, and so on."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class StatePart(Struct, frozen=True):
    """One part: tensors in a folder of its own."""

    version: int
    """Version of the part's content."""
    tensors: Callable[[], dict[str, torch.Tensor]]
    """The tensors to write, of this process."""
    load: Callable[[Path], None]
    """Read the folder. It may raise ValueError, KeyError or RuntimeError where the files belong to other settings."""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    length: float | None,
    process_group: ProcessGroup,
) -> dict[str, torch.Tensor]:
    """The part `optimizer`: moments, this process's random state, uint8 [bytes], and the length that a loss
    measured."""
    stored = {
        _random_name(process_group): torch.get_rng_state(),
        LENGTH: torch.tensor(length or 0.0, dtype=torch.float64),
    }
    return moments(optimizer, parameters) | stored


def load_optimizer(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    process_group: ProcessGroup,
) -> float | None:
    """Read what `optimizer_tensors` returned. Returns the length; None: it was not measured yet.

    A process that had no random state takes that of process 0.
    """
    load_moments(folder, optimizer, parameters, process_group)
    stored, name = stored_names(folder), _random_name(process_group)
    name = name if name in stored else RANDOM
    state, length = torch.zeros(stored[name], dtype=torch.uint8), torch.zeros((), dtype=torch.float64)
    read_tensors({name: state, LENGTH: length}, folder, process_group)
    torch.set_rng_state(state)
    return length.item() or None


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """This process's moments, in the shapes of their parameters, and step counts by `<parameter>::exp_avg` and so
    on."""
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
    values: dict[str, torch.Tensor] = {}
    for key, shape in stored_names(folder).items():
        name, _, moment = key.rpartition("::")
        if moment not in (*_MOMENTS, "step"):
            continue
        parameter = parameters.get(name)
        if parameter is None or (moment in _MOMENTS and shape != parameter.shape):
            raise ValueError(f"the optimizer's state `{key}` {shape} belongs to no trained parameter")
        values[key] = torch.zeros_like(parameter.detach()) if moment in _MOMENTS else torch.zeros(shape)
    read_tensors(values, folder, process_group)
    for key, value in values.items():
        name, _, moment = key.rpartition("::")
        set_moment(optimizer, parameters[name], moment, value)


def _random_name(process_group: ProcessGroup) -> str:
    return RANDOM if process_group.main else f"{RANDOM}.{process_group.rank}"
