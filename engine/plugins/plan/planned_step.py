"""One step of the real trainer with tensors that have sizes and no content, to count its memory.

The model is sharded by the real FSDP over a process group that sends nothing, and the bytes of living tensors are
counted (`AllocatedBytes`). So the count knows each model's own layers, vision towers included.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import TrainError
from engine.plugins.plan.planned_images import PlannedImages, planned_row
from engine.tokens.catalogue import resolve_model
from engine.train.auxiliary import AuxiliaryObjective, open_objectives
from engine.train.distributed import RunForward, ShardedProcessGroup
from engine.train.logprobs import CPU_BLOCK_ELEMENTS
from engine.train.optimizers import MasterWeights, local_of
from engine.train.packing import Pack, pack_rows
from engine.train.policy import Policy

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `now` is the number of bytes of living storages that were made in it, and `peak` the largest `now`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor of any shape, once, until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:  # FSDP resizes storages
            self.now += size - self._seen[key]
        else:
            self.now += size
            weakref.finalize(storage, self._free, key)
            self._storages[key] = weakref.ref(storage)
        self._seen[key] = size
        if self.now > self.peak * 1.001:  # sizes are read again rarely: a peak is exact to 0.1 %
            self._measure()
            self.peak = max(self.peak, self.now)

    def _measure(self) -> None:
        """Read the sizes of all storages again: FSDP sets those of gathered weights to 0 without an operation."""
        for key, reference in self._storages.items():
            storage = reference()
            if storage is not None and storage.nbytes() != self._seen[key]:
                self.now += storage.nbytes() - self._seen[key]
                self._seen[key] = storage.nbytes()

    def _free(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)
        self._storages.pop(key, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in (*tree_leaves(result), *tree_leaves(args)):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


_KEEPS_CONTENT = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
"""Number types of indices and masks, whose values decide about shapes."""
_AT = torch.ops.aten


class SizesOnly(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Within it, tensors of weights and activations have no content, and those of indices, masks and positions have.

    An operation whose tensors all have content is computed; its result has content. Any other is not computed. New
    tensors have content if they hold integers. So a model may look at token ids, positions and the grids of images, as
    vision models do.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        computed = all(_has_content(tensor) for tensor in tensors) if tensors else _makes_integers(func, args, given)
        if computed and torch.device(given.get("device") or "cpu").type == "cpu":
            return func(*args, **given)
        if func is _AT.index.Tensor or func is _AT.index_put.default or func is _AT.index_put_.default:
            args = (args[0], _as_numbers(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, given)


def _has_content(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


def _makes_integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _KEEPS_CONTENT
    return func.overloadpacket is _AT.arange and all(isinstance(arg, int) for arg in args)


def _as_numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices without masks: the shape of the result follows from the indices, and from a mask only with its
    content."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and _has_content(index):
            numbers += index.nonzero(as_tuple=True)
        else:
            numbers.append(index)
    return numbers


@contextmanager
def experts_in_any_dtype() -> Iterator[None]:
    """Within it, grouped products of experts are computed by an operation of transformers that knows its sizes for
    every number type.

    The sizes of torch's own are known for bfloat16 alone. Both take the same memory.
    """
    from transformers.integrations import moe

    grouped_mm = getattr(moe, "_can_use_grouped_mm", None)
    if grouped_mm is None:
        yield
        return
    moe._can_use_grouped_mm = lambda *_arguments: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = grouped_mm


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one process in a step."""

    weights: int
    masters: int
    """Float32 copies of 16-bit weights."""
    gradients: int
    moments: int
    """AdamW's moments in float32."""
    reference: int
    critic: int
    """The critic's own weights, their copies, gradients and moments."""
    images: int
    """Pixels of the micro-batch's images, and activations of the vision model."""
    activations: int
    """What a forward pass keeps for the backward pass, without `images`."""
    peak: int
    """All together, at the peak."""
    trained: int
    """Number of trained parameters, the critic's not included."""


def simulate(
    loaded: LoadedSpec,
    train: TrainSpec,
    format: ChatTemplate,
    *,
    processes: int,
    gpu: bool,
    tokens: int,
    images: PlannedImages | None,
) -> StepBytes:
    """Make a step with a micro-batch of one row.

    Args:
        loaded: The spec.
        train: Its `train:` section, as it is used.
        format: The model's chat format.
        processes: Number of processes.
        gpu: Take blocks of logits and AdamW's update as on a GPU, which has temporary tensors for all parameters at a
            time.
        tokens: Tokens of the row, of which all but the first and those of images are trained.
        images: The row's images; None: it has none.

    Raises:
        TrainError: kind `train_setup`: the model cannot be trained, or this process is one of several.
    """
    spec = loaded.spec
    folder = resolve_model(spec.model.path, spec.model.revision, loaded.base)
    memory = train.memory
    if not gpu:
        smaller = min(memory.logits_chunk_elements, CPU_BLOCK_ELEMENTS)
        memory = memory.model_copy(update={"logits_chunk_elements": smaller})
    train = train.model_copy(update={"device": "cpu", "memory": memory})
    with _planned(processes) as group:
        policy = Policy.load(
            folder, train, temperature=1.0, vocab=format.vocab_size, vision=format.vision, process_group=group
        )
        objectives = open_objectives(loaded, train, format, policy)
        with SizesOnly(), experts_in_any_dtype(), AllocatedBytes() as held:
            policy.shard(offload=train.memory.offload == "all")
            for objective in objectives:
                for head in objective.heads:
                    _replace_parameters(head, "meta")
                    _replace_parameters(head, "cpu")
                objective.shard(offload=train.memory.offload == "all")
            row = planned_row(policy.net.vision, policy.net.vocab, tokens, images)
            (pack,) = pack_rows([row], tokens, share_prefixes=False)
            return _step(policy, objectives, train, held, pack, gpu=gpu)


def _step(
    policy: Policy,
    objectives: Sequence[AuxiliaryObjective],
    train: TrainSpec,
    held: AllocatedBytes,
    pack: Pack,
    *,
    gpu: bool,
) -> StepBytes:
    """Make a step. What was computed before the micro-batch at the peak is there: moments, and gradients of other
    micro-batches."""
    masters = MasterWeights(dict(policy.named_parameters()))
    trained = list(masters.named.values())
    optimizer = torch.optim.AdamW(trained, lr=1e-6, foreach=gpu)
    of_objectives = [parameter for objective in objectives for parameter in objective.parameters.values()]
    others = [objective.optimizer for objective in objectives if objective.optimizer is not None]
    updated = [optimizer, *others]
    _set_gradients([*trained, *of_objectives])
    for updating in updated:
        updating.step()
        updating.zero_grad()
    seen = _VisionBytes(held, policy, *(objective.net for objective in objectives))
    held.peak = held.now
    _set_gradients([*trained, *of_objectives])  # of the micro-batches before
    before = held.now
    reads_states = any(objective.reads_states for objective in objectives)
    logprobs, entropy, states = policy.forward_with_states(pack, entropy=True, states=reads_states)
    predicted = [objective.predict(pack, states) for objective in objectives]
    activations = held.now - before
    if train.kl.in_loss:
        policy.reference(pack)
    assert entropy is not None
    total = logprobs.sum() + entropy.sum()
    total = sum((values.sum() for values in predicted if values is not None), start=total)
    total.backward()  # type: ignore[no-untyped-call]
    del logprobs, entropy, states, predicted, total
    for updating in reversed(updated):
        updating.step()
    return StepBytes(
        weights=_bytes(policy.model.parameters()),
        masters=_bytes(masters.copies),
        gradients=_bytes(trained),
        moments=_moments(optimizer),
        reference=0 if policy.reference_model is None else _bytes(policy.reference_model.model.parameters()),
        critic=_bytes([*(tensor for objective in objectives for tensor in objective.held()), *of_objectives])
        + sum(map(_moments, others)),
        images=seen.bytes,
        activations=activations - seen.bytes,
        peak=held.peak,
        trained=sum(local_of(parameter).numel() for parameter in trained),
    )


class _VisionBytes:
    """Counts what the vision towers of models keep, and the pixels that they get."""

    def __init__(self, held: AllocatedBytes, *models: Any) -> None:
        self.bytes = 0
        self._held, self._before = held, 0
        for model in models:
            tower = model.model.get_encoder("image") if model is not None else None
            if tower is not None and tower is not model.model:
                tower.register_forward_pre_hook(self._enter, with_kwargs=True)
                tower.register_forward_hook(self._leave)

    def _enter(self, tower: nn.Module, args: Any, kwargs: Any) -> None:
        pixels = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()
        ]
        self._before = self._held.now
        if torch.is_grad_enabled():
            self.bytes += _bytes(pixels)

    def _leave(self, tower: nn.Module, args: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            self.bytes += self._held.now - self._before


class _PlannedProcessGroup(ShardedProcessGroup):
    """Process 0 of several that exist in thought: sizes only, nothing is sent."""

    planned = True

    def __init__(self, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size = 0, size
        self._mesh = init_device_mesh("cpu", (size,))
        self._device = torch.device("cpu")
        self.torch_group: dist.ProcessGroup | None = dist.group.WORLD
        self._models, self._roots = [], []

    def shard(self, model: nn.Module, *, offload: bool = False) -> RunForward:
        _replace_parameters(model, "meta")
        if self.size > 1 or offload:
            return super().shard(model)
        _replace_parameters(model, "cpu")
        return lambda function, *args, **kwargs: function(*args, **kwargs)


@contextmanager
def _planned(processes: int) -> Iterator[_PlannedProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise TrainError(
            "the memory of a training is planned by one process: run `engine plan` without a launcher",
            kind="train_setup",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield _PlannedProcessGroup(processes)
    finally:
        dist.destroy_process_group()


def _replace_parameters(model: nn.Module, device: Literal["meta", "cpu"]) -> None:
    """Replace a model's parameters by ones without content; tied ones stay tied.

    `meta`: they have no memory. `cpu`: they have memory, which within `SizesOnly` is counted and not taken.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(
                        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = made[parameter]


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _moments(optimizer: torch.optim.Optimizer) -> int:
    return sum(_bytes(state.values()) for state in optimizer.state.values())


def _bytes(tensors: Any) -> int:
    return sum(local_of(tensor).nbytes for tensor in tensors if isinstance(tensor, Tensor))
