"""The torch device of a spec; used by the local backend and by the trainer."""

from __future__ import annotations

import torch

from engine.errors import EngineError


def pick_device(name: str, key: str) -> torch.device:
    """Return the device with this name. `auto` is the first CUDA device, or the CPU if there is none.

    Args:
        name: `auto`, `cpu`, `cuda`, `cuda:1`.
        key: The key of the spec that holds the name, for the message.

    Raises:
        EngineError: not the name of a device, or a CUDA device where torch finds none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"`{key}: {name}` is not a device; write auto, cpu, cuda or cuda:1"
        raise EngineError(message, kind="no_device", blame="spec") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"`{key}: {name}`, but torch finds no CUDA device; write cpu or auto"
        raise EngineError(message, kind="no_device", blame="spec")
    return device
