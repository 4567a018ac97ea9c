"""A model whose parameters FSDP2 shards: its blocks, and full tensors of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ShardedRoot(nn.Module):
    """A module whose `forward` runs any function of the model, because FSDP gathers weights at a module's `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass. Without gradients the weights are resharded here; with gradients `backward` reshards them."""
        found = self(function, *args, **kwargs)
        if not torch.is_grad_enabled():
            for part in sharded_modules(self):
                part.reshard()
        return found


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The layers of the decoder, which every pass runs once."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [module for module in text.modules() if type(module).__name__ in kinds]


def sharded_modules(root: nn.Module) -> list[Any]:
    """The modules that FSDP shards as one unit each."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def parameter_slots(model: nn.Module, only: Sequence[str] | None) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name, parameter) for each place that holds a parameter. A tied parameter is held in several places."""
    chosen = None if only is None else set(only)
    return [
        (module, name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (chosen is None or f"{path}.{name}" in chosen)
    ]


def full_tensor_on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor, of its whole shape, on the CPU, without its graph, in memory of its own."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.to("cpu", copy=True)  # gathered from uneven shards, it is a part of a larger memory
