"""Several processes that learn as one: weights, gradients and optimizer state are sharded (FSDP2, arXiv 2304.11277).

    accelerate launch --num_processes 8 -m engine.cli.main train SPEC        # or torchrun; one process is `SingleProcessGroup`

    process_group = join_process_group()                                   # before the model is loaded: it says which device is whose
    forward = process_group.shard(policy.model)              # before the optimizer is made: its parameters are new ones
    if not process_group.main:
        process_group.serve_calls({"step": learner.step})         # does what process 0 does, until that calls `close`

Process 0 alone collects episodes and talks to the backend; a method that every process must go through begins with
`process_group.tell`, which hands its arguments to the others.

Invariants:
- Gradients are summed over processes (in float32), never averaged: a token's share is already of the whole step's loss,
  so a step is the same however many processes it is spread over.
- Every process makes the same number of passes: where one has fewer packs it makes one more, in which shares are 0.
- Outside of passes no process holds whole weights, but within `whole`, where process 0 has them on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.errors import TrainError

T = TypeVar("T")
RunForward = Callable[..., Any]
"""run(function, *args, **kwargs) -> what the function answers: a pass, in which the weights are there."""

_CONTROL_TIMEOUT = timedelta(days=7)
"""How long the others wait to be told something: as long as episodes take. Within a step, torch's own limit holds."""
_STOP = "close"
_FULL_PARAMETERS = "whole"
_WRITE_PARAMETERS = "write"


class ProcessGroup(Protocol):
    """What a learner asks of the processes that it runs on."""

    rank: int
    size: int

    @property
    def main(self) -> bool:
        """Whether this is process 0."""

    def shard(self, model: nn.Module) -> RunForward:
        """Spread a model's weights; through what is returned, everything that needs them is to be called."""

    def call_others(self, method: str, *args: Any) -> None:
        """From process 0: have the others call that method of theirs. From another: nothing."""

    def serve_calls(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """In the others: do what is told until process 0 closes."""

    def assign(self, packs: Sequence[T], cost: Callable[[T], int]) -> list[tuple[T, bool]]:
        """This process's packs, and whether each counts: one that does not is only there for the pass."""

    def all_gather(self, value: T) -> list[T]:
        """Every process's value, by rank, on all of them."""

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Scale gradients to a norm of at most `limit`; the norm over all shards, before."""

    def full_parameters(self, model: nn.Module, *, write: bool = False) -> Any:
        """A context in which process 0's model has whole weights; with `write`, what it sets in them is kept."""

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of sharded ones: on process 0, and nothing on the others. SingleProcessGroup, the tensors themselves."""

    def shard_like(self, value: Tensor, like: Tensor) -> Tensor:
        """Process 0's whole value (elsewhere it does not matter which), sharded and placed as `like` is."""

    def close(self) -> None:
        """From process 0: let the others go. After an error that they did not have, exit instead: the launcher ends them."""


class SingleProcessGroup:
    """A process_group of one: everything is here."""

    rank = 0
    size = 1
    main = True

    def shard(self, model: nn.Module) -> RunForward:
        return lambda function, *args, **kwargs: function(*args, **kwargs)

    def call_others(self, method: str, *args: Any) -> None:
        pass

    def serve_calls(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        pass

    def assign(self, packs: Sequence[T], cost: Callable[[T], int]) -> list[tuple[T, bool]]:
        return [(pack, True) for pack in packs]

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    @contextmanager
    def full_parameters(self, model: nn.Module, *, write: bool = False) -> Iterator[None]:
        yield

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def shard_like(self, value: Tensor, like: Tensor) -> Tensor:
        return value.to(like.device)

    def close(self) -> None:
        pass


def join_process_group() -> ProcessGroup:
    """The process_group that this process was launched in (`WORLD_SIZE`, `RANK`, `LOCAL_RANK`, `MASTER_ADDR`); sets its device.

    Raises:
        TrainError: kind `train_setup`: the processes do not find each other, or torch is too old.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SingleProcessGroup()
    cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    try:
        if not cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl")
        return ShardedProcessGroup("cpu" if cpu else "cuda")
    except (KeyError, ValueError, RuntimeError) as error:
        raise TrainError(
            f"the {os.environ['WORLD_SIZE']} processes of this training do not come together ({error}); launch them with "
            "`accelerate launch` or `torchrun`, or unset WORLD_SIZE",
            kind="train_setup",
        ) from error


class ShardedProcessGroup:
    """One of several processes of a training; made by `join`."""

    def __init__(self, kind: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._mesh = init_device_mesh(kind, (self.size,))
        self._control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
        self._models: list[nn.Module] = []
        self._roots: list[_ShardedRoot] = []

    @property
    def main(self) -> bool:
        return self.rank == 0

    def shard(self, model: nn.Module) -> RunForward:
        """Shard each of the text model's blocks (`_no_split_modules`), and what is outside of them as one.

        A block is gathered when it is called, and every process has to call it as often: so what sees images, which not
        every pass does, is not sharded by block. A parameter that a pass does not use has a gradient of 0.

        Every process has loaded the same weights. Parameters are new objects from here on, each with its share of the
        rows; those that are tied stay so. What the model computes outside of its own `forward` (a head whose weight is
        used by itself) is covered: the pass is whatever is called through the function returned.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        sums = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in _decoder_blocks(model):
            fully_shard(block, mesh=self._mesh, mp_policy=sums)
        root = _ShardedRoot(model)
        fully_shard(root, mesh=self._mesh, mp_policy=sums)
        for part in _sharded_modules(root):
            if not hasattr(part, "set_reduce_scatter_unused_params"):
                raise TrainError(
                    f"torch {torch.__version__} cannot sum gradients over processes; take a newer one",
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
            dist.broadcast_object_list([(method, args)], src=0, group=self._control)

    def serve_calls(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Does what is told. A TrainError is raised in every process alike: it is process 0's to decide what then."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self._control)
            method, args = told[0]
            if method == _STOP:
                dist.destroy_process_group()
                return
            if method == _FULL_PARAMETERS:
                with self.full_parameters(self._models[args[0]]):
                    continue
            if method == _WRITE_PARAMETERS:
                self._write_parameters(self._models[args[0]], [])
                continue
            try:
                methods[method](*args)
            except TrainError:
                continue

    def assign(self, packs: Sequence[T], cost: Callable[[T], int]) -> list[tuple[T, bool]]:
        """Packs that are computed at the same time are of about the same cost: processes wait for each other's layers.

        With no packs at all there are no passes.
        """
        order = sorted(range(len(packs)), key=lambda number: (-cost(packs[number]), number))
        dealt = []
        for first in range(0, len(order), self.size):
            mine = first + self.rank
            dealt.append((packs[order[mine]], True) if mine < len(order) else (packs[order[-1]], False))
        return dealt

    def all_gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, limit, whole)
        return float(whole)

    @contextmanager
    def full_parameters(self, model: nn.Module, *, write: bool = False) -> Iterator[None]:
        """One parameter is gathered at a time; on process 0 they are all put in the model, on the CPU."""
        number = next(number for number, each in enumerate(self._models) if each is model)
        self.call_others(_FULL_PARAMETERS, number)
        for part in _sharded_modules(self._roots[number]):
            part.reshard()
        held = _parameter_slots(model)
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in dict.fromkeys(parameter for _, _, parameter in held):
            found = _full_tensor_on_cpu(parameter)
            if self.main:
                whole[parameter] = nn.Parameter(found, requires_grad=parameter.requires_grad)
        if not self.main:
            yield
            return
        try:
            for module, name, parameter in held:
                module._parameters[name] = whole[parameter]
            yield
        finally:
            for module, name, parameter in held:
                module._parameters[name] = parameter
        if write:
            self.call_others(_WRITE_PARAMETERS, number)
            self._write_parameters(model, [parameter.detach() for parameter in whole.values()])

    @torch.no_grad()
    def _write_parameters(self, model: nn.Module, values: Sequence[Tensor]) -> None:
        """Give every process its share of process 0's values, which are those of the model's parameters in order."""
        parameters = list(dict.fromkeys(parameter for _, _, parameter in _parameter_slots(model)))
        for number, parameter in enumerate(parameters):
            parameter.copy_(self.shard_like(values[number] if values else parameter, parameter))

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            full = _full_tensor_on_cpu(tensor)
            if self.main:
                found[name] = full
        return found

    def shard_like(self, value: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return value.to(like.device)
        found = value if self.main else torch.empty(like.shape)
        local = found.to(device=like.device, dtype=like.dtype).contiguous()
        return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=0)

    def close(self) -> None:
        if self.main:
            self.call_others(_STOP)
            dist.destroy_process_group()


class _ShardedRoot(nn.Module):
    """A model, and whatever is computed with it, as one module: sharding hooks into a module's `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A pass. One without gradients leaves no whole weights behind; after one with them, `backward` sees to it."""
        found = self(function, *args, **kwargs)
        if not torch.is_grad_enabled():
            for part in _sharded_modules(self):
                part.reshard()
        return found


def _decoder_blocks(model: Any) -> list[nn.Module]:
    """The layers that every pass goes through once."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [module for module in text.modules() if type(module).__name__ in kinds]


def _sharded_modules(root: nn.Module) -> list[Any]:
    """The modules that are sharded as one each."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _parameter_slots(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where the model holds each parameter; one that is tied is held in several places."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _full_tensor_on_cpu(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on the CPU, without its graph, in memory of its own: files are written of it."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.to("cpu", copy=True)  # gathered from uneven shards, it is a part of a larger memory
