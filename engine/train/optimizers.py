"""The optimizers and their learning rate: AdamW of torch, AdamW with moments of 8 bits (torchao), moments that stay on
the CPU between updates, and float32 master weights of 16-bit parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.errors import TrainError

if TYPE_CHECKING:
    from engine.schemas.train import OptimizerSpec, TrainSpec

_GROUP_BYTES = 256 << 20
"""Bytes of parameters whose moments are on the device at the same time, if moments stay on the CPU."""


class MasterWeights:
    """The tensors that an optimizer updates: a float32 copy of each 16-bit parameter, and the other parameters
    themselves.

    Neighbouring bfloat16 numbers are further apart than the steps of AdamW at learning rates such as 1e-6, so these
    would be rounded away. Gradients of such a parameter are added up in float32 too; it has none itself. Stochastic
    rounding would need no copies, but adds noise that is larger than the movement, and its random numbers would be a
    part of every checkpoint.

    Args:
        parameters: The trained parameters by name, sharded or not.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.named: dict[str, nn.Parameter] = {}
        """What is updated, by the names of the parameters, each in its parameter's shape."""
        self.copies: list[nn.Parameter] = []
        """Those of it that are copies."""
        self._copied: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            if parameter.dtype.itemsize > 2:
                self.named[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().float())
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))  # type: ignore[no-untyped-call]
            self.named[name] = master
            self.copies.append(master)
            self._copied.append(parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into their parameters."""
        for parameter, master in zip(self._copied, self.copies, strict=True):
            local_of(parameter).copy_(local_of(master))

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, detached but not copied: this process's part of each, in its parameter's shape."""
        return {name: weight.detach() for name, weight in self.named.items()}


def _add_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def make_optimizer(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Make the optimizer of `train.optimizer`.

    Raises:
        TrainError: kind `train_setup`: torchao is not installed.
    """
    settings: dict[str, Any] = {
        "lr": spec.lr,
        "betas": (spec.betas[0], spec.betas[1]),
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
    }
    if spec.kind == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainError(
            f"`train.optimizer.kind: {spec.kind}` needs torchao ({error}): pip install 'episode-engine[adamw-8bit]'",
            kind="train_setup",
        ) from error
    made: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
    return made


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate. torchao keeps it in a tensor, so that its compiled update need not be compiled again."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(optimizer: torch.optim.Optimizer, *, offload: bool) -> None:
    """Make one update. `offload`: the moments stay on the CPU; those of some parameters at a time are copied to the
    device.

    The arithmetic is the same: each parameter's update depends on its own gradient and moments only.
    """
    if not offload:
        optimizer.step()
        return
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    ends = accumulate(local_of(parameter).nbytes for parameter in parameters)
    for _, some in groupby(zip(parameters, gradients, ends, strict=True), key=lambda of: of[2] // _GROUP_BYTES):
        group = list(some)
        for parameter, gradient, _ in group:
            parameter.grad = gradient
            _move_moments(optimizer, parameter, local_of(parameter).device)
        optimizer.step()
        for parameter, *_ in group:
            _move_moments(optimizer, parameter, torch.device("cpu"))
            parameter.grad = None


def local_of(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: of a sharded one, shape [its rows, …]; else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_moment(value: Tensor) -> Tensor:
    """A moment in a plain number type; moments of 8 bits are dequantized to float32. The shape is the same."""
    part = local_of(value)
    if type(part) is Tensor:
        return value
    return _like(value, part.dequantize())


def set_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """Set a moment or the step count of a parameter from a plain tensor, which has the parameter's shape.

    A dequantized moment is quantized with the scale that it had: torchao's own scale of it is up to 0.7 % smaller. The
    largest element of a block had the code of 1 or, if it is negative, that of the smallest number of the map, above
    -1.
    """
    make = getattr(optimizer, "_new_buffer", None)
    if make is not None and name != "step":
        held: Tensor = make(parameter, name == "exp_avg")
        held.copy_(value)
        codes: Any = local_of(held)
        if type(codes) is not Tensor and codes.signed:
            from torchao.optim.quant_utils import quantize_8bit_with_qmap

            blocks = local_of(value).reshape(-1, codes.block_size)
            scale = torch.maximum(blocks.amax(-1), blocks.amin(-1) / codes.qmap[0]).clip(1e-12)
            codes.scale.copy_(scale)
            quantized = quantize_8bit_with_qmap((blocks / scale[:, None]).view(-1), codes.qmap)
            codes.codes.copy_(quantized.view(codes.codes.shape))
        value = held
    optimizer.state[parameter][name] = value


def _move_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, device: torch.device) -> None:
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            state[name] = _like(value, local_of(value).to(device))


def _like(value: Tensor, part: Tensor) -> Tensor:
    """`part` as the local part of a tensor that is sharded as `value` is."""
    if not isinstance(value, DTensor):
        return part
    return DTensor.from_local(part, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The policy's learning rate in a step, counted from 0: `optimizer.warmup_steps`, then `optimizer.schedule`."""
    optimizer = spec.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    decay = (step - optimizer.warmup_steps) / max(1, spec.steps - optimizer.warmup_steps)
    if optimizer.schedule == "linear":
        return optimizer.lr * (1.0 - decay)
    return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * decay))
