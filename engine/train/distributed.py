"""Process groups: one training job in several processes, with sharded weights, gradients and optimizer state (FSDP2).

FSDP is described in arXiv 2304.11277. One process is a plain `ProcessGroup`.

    accelerate launch --num_processes 8 -m engine.cli.main train SPEC    # or torchrun

    process_group = join_process_group()               # before the model is loaded: sets the device of this process
    policy.shard(process_group)                        # before the optimizer is made: sharding replaces the parameters
    if not process_group.main:
        process_group.serve_calls({"step": learner.step})   # runs the calls of process 0 until process 0 calls `close`

Only process 0 collects episodes and talks to the backend. A method that every process must run begins with
`process_group.call_others`, which sends its name and arguments to the other processes.

Invariants:
- Gradients are summed over processes (in float32), never averaged: a token's loss weight is already relative to the
  whole step, so a step has the same result with any number of processes.
- Every process runs the same number of forward passes. A process with fewer packs runs one again with loss weights 0.
- No process holds full weights, except those of one block in a forward or backward pass, and in `full_parameters`:
  there process 0 has them on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.errors import TrainError

T = TypeVar("T")
RunForward = Callable[..., Any]
"""run(function, *args, **kwargs) -> the function's result. The function runs as a forward pass with gathered
weights."""

_CONTROL_TIMEOUT = timedelta(days=7)
"""How long the other processes wait for the next call: episodes may take long. Within a step, torch's own limit
holds."""
_STOP = "close"
_FULL_PARAMETERS = "whole"


class ProcessGroup:
    """The processes of one training job, as one process of them sees it: here one process alone, and nothing is
    sharded."""

    rank = 0
    size = 1
    main = True
    """Whether this is process 0."""
    torch_group: dist.ProcessGroup | None = None
    """torch's process group for data on the CPU; None if there is one process."""
    planned = False
    """Whether weights have sizes only, because memory is planned."""

    def shard(self, model: nn.Module, *, offload: bool = False) -> RunForward:
        """Shard a model's weights. Everything that needs the weights must be called through the returned function.

        Weights on the meta device get memory for this process's part, without values. `offload`: the parts, their
        gradients and the optimizer's state stay on the CPU, and a block is copied to the device while it computes.
        """
        return lambda function, *args, **kwargs: function(*args, **kwargs)

    def call_others(self, method: str, *args: Any) -> None:
        """In process 0: have the other processes call that method of theirs. In the others: nothing."""

    def serve_calls(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """In the other processes: run the calls of process 0 until it calls `close`."""

    def assign(self, packs: Sequence[T], cost: Callable[[T], int]) -> list[tuple[T, bool]]:
        """This process's packs, each with True if its loss counts. A pack with False is run only to keep processes in
        step."""
        return [(pack, True) for pack in packs]

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes by rank, in every process."""
        return [value]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Scale the gradients to a norm of at most `limit`. Returns the norm over all shards before scaling."""
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, limit, total)
        return float(total)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters that every process holds as a whole. A missing gradient counts as 0."""

    @contextmanager
    def full_parameters(
        self, model: nn.Module, only: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """A context in which process 0's model has full weights on the CPU, or full weights of the names in `only`.

        `dtype`: number type of the gathered weights. Default: their own.
        """
        yield

    def copy_part(self, value: Tensor | None, into: Tensor, *, scatter: bool = False) -> None:
        """Copy this process's part of a full value into a tensor. Every process has the value; with `scatter` process 0
        has it, and those of the others are ignored.

        `value` has the shape of the whole of `into`.
        """
        assert value is not None
        into.copy_(value)

    def close(self) -> None:
        """In process 0: end `serve_calls` in the others. After an error in process 0 alone, exit instead: the launcher
        ends them."""


def join_process_group() -> ProcessGroup:
    """Join the process group of the launcher (`WORLD_SIZE`, `RANK`, `LOCAL_RANK`, `MASTER_ADDR`) and set the CUDA
    device.

    Raises:
        TrainError: kind `train_setup`: the processes cannot connect to each other, or torch is too old.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ProcessGroup()
    try:
        if _backend() != "gloo":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group(_backend())
        return ShardedProcessGroup("cpu" if _backend() == "gloo" else "cuda")
    except (KeyError, ValueError, RuntimeError) as error:
        raise TrainError(
            f"the {os.environ['WORLD_SIZE']} processes of this training cannot connect to each other ({error}); launch "
            "them with `accelerate launch` or `torchrun`, or unset WORLD_SIZE",
            kind="train_setup",
        ) from error


def join_alone() -> ProcessGroup:
    """A process group of this process, which shards over itself: so that weights can stay on the CPU
    (`memory.offload: all`)."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
    return ShardedProcessGroup("cpu" if _backend() == "gloo" else "cuda")


def _backend() -> str:
    cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return "gloo" if cpu else "cpu:gloo,cuda:nccl"


class ShardedProcessGroup(ProcessGroup):
    """A process group of several processes. Made by `join_process_group`."""

    def __init__(self, kind: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.main = self.rank == 0
        self._mesh = init_device_mesh(kind, (self.size,))
        self._device = torch.device(kind)
        self.torch_group = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
        self._models: list[nn.Module] = []
        self._roots: list[ShardedRoot] = []

    def shard(self, model: nn.Module, *, offload: bool = False) -> RunForward:
        """Shard each block of the text model (`_no_split_modules`) by itself, and all other parameters as one unit.

        A block is gathered when it is called, and every process must call it equally often. The vision tower does not
        run in every pass, so its blocks are not sharded by themselves. A parameter that a pass does not use has
        gradient 0.

        Weights that are not on the meta device must be the same in every process. Sharding replaces the parameters:
        each process holds a part of the rows, and tied parameters stay tied. Weights that are used outside of the
        model's own `forward` (the output layer) are gathered as well, because the pass is the function that is called
        through the result.

        Raises:
            TrainError: the installed torch cannot sum gradients over processes.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        sums = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        stay = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if offload else OffloadPolicy()
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
        for block in [module for module in decoder.modules() if type(module).__name__ in kinds]:
            fully_shard(block, mesh=self._mesh, mp_policy=sums, offload_policy=stay)
        root = ShardedRoot(model)
        fully_shard(root, mesh=self._mesh, mp_policy=sums, offload_policy=stay)
        home = torch.device("cpu") if offload else self._device
        root._apply(  # type: ignore[no-untyped-call]
            lambda part: torch.empty_like(part, device=home) if part.is_meta else part
        )
        for part in sharded_modules(root):
            if not hasattr(part, "set_reduce_scatter_unused_params"):
                raise TrainError(
                    f"torch {torch.__version__} cannot sum gradients over processes; install torch 2.13 or newer",
                    kind="train_setup",
                )
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
        self._models.append(model)
        self._roots.append(root)
        return root.run

    def call_others(self, method: str, *args: Any) -> None:
        if self.main:
            dist.broadcast_object_list([(method, args)], src=0, group=self.torch_group)

    def serve_calls(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Run the calls of process 0. A TrainError occurs in every process alike, and process 0 handles it: ignored
        here."""
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=self.torch_group)
            method, args = message[0]
            if method == _STOP:
                dist.destroy_process_group()
                return
            if method == _FULL_PARAMETERS:
                with self.full_parameters(self._models[args[0]], args[1]):
                    continue
            try:
                methods[method](*args)
            except TrainError:
                continue

    def assign(self, packs: Sequence[T], cost: Callable[[T], int]) -> list[tuple[T, bool]]:
        """Assign packs by cost: processes wait for each other at each layer, so concurrent packs should cost the same.

        Returns an empty list if there are no packs.
        """
        order = sorted(range(len(packs)), key=lambda number: (-cost(packs[number]), number))
        dealt = []
        for first in range(0, len(order), self.size):
            mine = first + self.rank
            dealt.append((packs[order[mine]], True) if mine < len(order) else (packs[order[-1]], False))
        return dealt

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.torch_group)
        return values

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    @contextmanager
    def full_parameters(
        self, model: nn.Module, only: Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """Gather one parameter at a time. In process 0 the model then holds all of them on the CPU."""
        number = next(number for number, other in enumerate(self._models) if other is model)
        self.call_others(_FULL_PARAMETERS, number, only)
        for part in sharded_modules(self._roots[number]):
            part.reshard()
        held = [  # a tied parameter is held in several places
            (module, name, parameter)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and (only is None or f"{path}.{name}" in only)
        ]
        full: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in dict.fromkeys(parameter for _, _, parameter in held):
            tensor = full_tensor_on_cpu(parameter)
            if self.main:
                tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                full[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        if not self.main:
            yield
            return
        try:
            for module, name, parameter in held:
                module._parameters[name] = full[parameter]
            yield
        finally:
            for module, name, parameter in held:
                module._parameters[name] = parameter

    @torch.no_grad()
    def copy_part(self, value: Tensor | None, into: Tensor, *, scatter: bool = False) -> None:
        if scatter and not self.main:
            value = torch.empty(into.shape) if isinstance(into, DTensor) else None
        if not isinstance(into, DTensor):
            full = self.all_gather(value)[0] if scatter else value
            assert full is not None
            into.copy_(full)
            return
        assert value is not None
        local = value.to(device=self._device, dtype=into.dtype).contiguous()
        part = distribute_tensor(local, into.device_mesh, into.placements, src_data_rank=0 if scatter else None)
        into.to_local().copy_(part.to_local())

    def close(self) -> None:
        if self.main:
            self.call_others(_STOP)
            dist.destroy_process_group()


class ShardedRoot(nn.Module):
    """A module whose `forward` runs any function of the model, because FSDP gathers weights at a module's `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass. Without gradients the weights are resharded here; with gradients `backward` reshards
        them."""
        result = self(function, *args, **kwargs)
        if not torch.is_grad_enabled():
            for part in sharded_modules(self):
                part.reshard()
        return result


def sharded_modules(root: nn.Module) -> list[Any]:
    """The modules that FSDP shards as one unit each."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def full_tensor_on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor, of its whole shape, on the CPU, without its graph, in memory of its own."""
    full = tensor.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.to("cpu", copy=True)  # gathered from uneven shards, it is a part of a larger memory
