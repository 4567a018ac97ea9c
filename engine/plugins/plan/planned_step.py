"""One step of the real trainer with tensors that have sizes and no content, to count its memory; its row, with blank
images of a given size.

The model is sharded by the real FSDP over a process group that sends nothing, and the bytes of living tensors are
counted (`AllocatedBytes`). So the count knows each model's own layers, vision towers included. Of layers and blocks of
logits that repeat, only as many are run as decide about all.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import ImageError, TrainError
from engine.schemas.sections import used_plugins
from engine.schemas.trajectory import ImageSpan
from engine.store.rows.row import TrainingRow
from engine.tokens.catalogue import resolve_model
from engine.train.auxiliary import OBJECTIVES, AuxiliaryObjective
from engine.train.distributed import RunForward, ShardedProcessGroup
from engine.train.logprobs import CPU_BLOCK_ELEMENTS, representative_vocab
from engine.train.optimizers import MasterWeights, local_of
from engine.train.packing import Pack, pack_rows
from engine.train.policy import Policy

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.tokens.vision import Vision


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `now` is the number of bytes of living storages that were made in it, and `peak` the largest `now`
    since `begin`; `peaks` holds those before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.peaks: list[int] = []
        self._inner = False
        self._seen: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gathered: set[int] = set()
        """Storages of FSDP, which sets those of gathered weights to 0 without an operation."""

    def begin(self, inner: bool = False) -> None:
        """Begin a new peak. That of an inner part is not kept."""
        if not self._inner:
            self.peaks.append(self.peak)
        self._inner = inner
        self._measure()
        self.peak = self.now

    def add(self, tensor: torch.Tensor, *, gathered: bool = False) -> None:
        """Count the storage of a tensor of any shape, once, until it is freed."""
        if type(tensor) is not FakeTensor:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if tensor.is_meta:
                return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        counted = self._seen.get(key)
        if counted is None:
            self._storages[key] = weakref.ref(storage, partial(self._free, key))
        if counted != size:
            self.now += size - (counted or 0)
            self._seen[key] = size
        if gathered:
            self._gathered.add(key)
        if self.now > self.peak:
            self._measure()
            self.peak = max(self.peak, self.now)

    def _measure(self) -> None:
        """Read the sizes of FSDP's storages again."""
        for key in self._gathered:
            storage = self._storages[key]()
            if storage is not None and (size := storage.nbytes()) != self._seen[key]:
                self.now += size - self._seen[key]
                self._seen[key] = size

    def _free(self, key: int, _reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.now -= self._seen.pop(key)
        del self._storages[key]
        self._gathered.discard(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:
            return function(*args)
        named = kwargs or {}
        result = function(*args, **named)
        gathered = function.namespace == "fsdp"
        for leaf in _leaves([result, *args, *named.values()]):
            self.add(leaf, gathered=gathered)
        return result


def _leaves(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors of arguments, and of lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _leaves(value)


_KEEPS_CONTENT = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
"""Number types of indices and masks, whose values decide about shapes."""
_AT = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


class SizesOnly(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Within it, tensors of weights and activations have no content, and those of indices, masks and positions have.

    An operation whose tensors all have content is computed; its result has content. Any other is not computed. New
    tensors have content if they hold integers. So a model may look at token ids, positions and the grids of images, as
    vision models do.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        given = dict(kwargs or {})
        tensors = list(_leaves([*args, *given.values()]))
        if tensors:
            computed = all(_has_content(tensor) for tensor in tensors)
        elif given.get("dtype") is not None:
            computed = given["dtype"] in _KEEPS_CONTENT
        else:
            computed = func.overloadpacket is _AT.arange and all(isinstance(arg, int) for arg in args)
        if computed and torch.device(given.get("device") or "cpu").type == "cpu":
            return func(*args, **given)
        if func is _AT.index.Tensor or func is _AT.index_put.default or func is _AT.index_put_.default:
            args = (args[0], _as_numbers(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, given)


def _has_content(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


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


_LARGEST_SIDE = 4096
"""Pixels of the longest side that `largest_images` tries; the processors of models that ship scale images to less."""


class PlannedImages(NamedTuple):
    """The images of a micro-batch, all of one size."""

    number: int
    width: int
    """Pixels of an image as it is shown; the model's processor scales it."""
    height: int

    def __str__(self) -> str:
        return f"{self.number} image{'s' if self.number > 1 else ''} of {self.width} x {self.height} pixels"


def image_tokens(vision: Vision, images: PlannedImages) -> int:
    """Number of tokens that the images take in a row, with one token after each.

    Raises:
        TrainError: kind `train_setup`: the model's processor refuses an image of this size.
    """
    try:
        one = vision.processing.tokens_of_size(images.width, images.height)
    except ImageError as error:
        raise TrainError(f"images of the plan ({images}): {error}", kind="train_setup") from error
    return images.number * (1 + (len(_shown(vision, 0, images).ids) if one is None else one))


def largest_images(vision: Vision, count: int, tokens: int) -> PlannedImages:
    """`count` square images that take as many of `tokens` tokens as they can; the smallest ones if none fit."""

    def of(side: int) -> int:
        return image_tokens(vision, PlannedImages(count, side, side))

    most = min(_LARGEST_SIDE, int(vision.most_pixels**0.5))
    side = _largest(lambda side: of(side) <= tokens, most)
    taken = of(side)
    if taken <= tokens and of(1) < taken:
        side = _largest(lambda side: of(side) < taken, side) + 1  # larger ones are scaled down to this
    return PlannedImages(count, side, side)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, if it holds for all smaller ones; 1 if there is none."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def planned_row(vision: Vision | None, vocabulary: int, tokens: int, images: PlannedImages | None) -> TrainingRow:
    """A row of which all tokens are trained but the first and those of images, which come after it.

    Args:
        vision: The model's images; None for a text model.
        vocabulary: Number of ids.
        tokens: Tokens of the row.
        images: Its images.
    """
    text = np.arange(vocabulary)
    pieces, placed, length = [text[:1]], [], 1
    if vision is not None:
        text = np.setdiff1d(text, vision.banned)
        for number in range(0 if images is None else images.number):
            assert images is not None
            picture = _shown(vision, number, images)
            pieces += [picture.ids, text[:1]]  # a model finds the images of a row by what is between them
            start, length = length, length + len(picture.ids) + 1
            placed.append(ImageSpan(image=picture.digest, start=start, end=length - 1, grid=list(picture.grid)))
    pieces.append(text[np.arange(tokens - length) % len(text)])
    return TrainingRow.of_tokens(np.concatenate(pieces), np.arange(tokens) >= length, images=placed)


def _shown(vision: Vision, number: int, images: PlannedImages) -> Any:
    """A blank image after the model's processor. Each number has a digest of its own, as different images have."""
    from PIL import Image

    digest = f"planned:{images.width}x{images.height}:{number}"
    file = io.BytesIO()
    Image.new("1", (images.width, images.height)).save(file, "PNG")
    vision.bank.put(digest, file.getvalue(), "image/png")
    try:
        return vision.bank.picture(digest)
    except ImageError as error:
        raise TrainError(f"images of the plan ({images}): {error}", kind="train_setup") from error


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
    trained: int
    """Number of trained parameters, the critic's not included."""
    peaks: tuple[int, ...]
    """All together, at the peak of each part of the step."""

    @property
    def peak(self) -> int:
        """All together, at the peak."""
        return max(self.peaks)

    def followed_by(self, more: StepBytes, number: int) -> StepBytes:
        """The step with `number` further layers of a model, where `more` is the one with the first of them."""
        peaks = tuple(a + number * (b - a) for a, b in zip(self.peaks, more.peaks, strict=True))
        pairs = {name: (getattr(self, name), getattr(more, name)) for name in self.__slots__ if name != "peaks"}
        return StepBytes(peaks=peaks, **{name: a + number * (b - a) for name, (a, b) in pairs.items()})


LEAST_COPIES = {False: 3, True: 5}
"""Copies of repeated layers in the smaller of two steps, without and with images: a first one, and two last ones,
because FSDP holds what a layer before gathered; the first three layers may get features of images."""


StepSize = tuple[int, PlannedImages | None]
"""The micro-batch of a step, one row: its tokens, of which all but the first and those of images are trained, and its
images."""


def simulate(
    loaded: LoadedSpec, train: TrainSpec, format: ChatTemplate, sizes: Sequence[StepSize], *, processes: int, gpu: bool
) -> list[StepBytes]:
    """Make a step for each size of a micro-batch.

    Where layers repeat, the bytes of each part of a step grow by the same number with each copy. So two short models
    are run, which differ by one copy, and their difference is added for the others.

    Args:
        loaded: The spec.
        train: Its `train:` section, as it is used.
        format: The model's chat format.
        sizes: The micro-batches.
        processes: Number of processes.
        gpu: Take blocks of logits and AdamW's update as on a GPU, which has temporary tensors for all parameters at a
            time.

    Raises:
        TrainError: kind `train_setup`: the model cannot be trained, or this process is one of several.
    """
    memory = train.memory
    if not gpu:
        smaller = min(memory.logits_chunk_elements, CPU_BLOCK_ELEMENTS)
        memory = memory.model_copy(update={"logits_chunk_elements": smaller})
    train = train.model_copy(update={"device": "cpu", "memory": memory})
    fewest = LEAST_COPIES[any(images is not None for _, images in sizes)]

    def of_copies(number: int) -> tuple[list[StepBytes], int]:
        with _planned(processes) as group:
            return simulate_copies(loaded, train, format, sizes, group, number, gpu=gpu)

    steps, copies = of_copies(fewest)
    if copies > fewest:
        more, _ = of_copies(fewest + 1)
        steps = [step.followed_by(longer, copies - fewest) for step, longer in zip(steps, more, strict=True)]
    return steps


def simulate_copies(
    loaded: LoadedSpec,
    train: TrainSpec,
    format: ChatTemplate,
    sizes: Sequence[StepSize],
    group: _PlannedProcessGroup,
    copies: int,
    *,
    gpu: bool,
) -> tuple[list[StepBytes], int]:
    """Steps with at most `copies` copies of the layers that repeat, and how many copies the model has; `copies` if all
    of its layers were there."""
    folder = resolve_model(loaded.spec.model.path, loaded.spec.model.revision, loaded.base)
    offload = train.memory.offload == "all"
    policy = Policy.load(
        folder, train, temperature=1.0, vocab=format.vocab_size, vision=format.vision, process_group=group
    )
    objectives = OBJECTIVES.made(used_plugins(loaded.spec), loaded, train, format, policy)
    nets = [policy.net, policy.reference_model, *(objective.net for objective in objectives)]
    layers = [RepeatedLayers(net.model) for net in nets if net is not None]
    counts = {repeated.copies for repeated in layers}
    alike = len(counts) == 1 and min(counts) >= copies
    with SizesOnly(allow_non_fake_inputs=True), experts_in_any_dtype(), AllocatedBytes() as held:
        if alike:
            for repeated in layers:
                repeated.shorten(copies)
        policy.shard(offload=offload)
        for objective in objectives:
            for head in objective.heads:
                _replace_parameters(head, "meta")
                _replace_parameters(head, "cpu")
            objective.shard(offload=offload)
        if alike:
            for repeated in layers:
                repeated.watch(held)
        return _steps(policy, objectives, train, held, sizes, gpu=gpu), min(counts) if alike else copies


def _steps(
    policy: Policy,
    objectives: Sequence[AuxiliaryObjective],
    train: TrainSpec,
    held: AllocatedBytes,
    sizes: Sequence[StepSize],
    *,
    gpu: bool,
) -> list[StepBytes]:
    """Make steps. What was computed before the micro-batch at the peak is there: moments, and gradients of other
    micro-batches."""
    masters = MasterWeights(dict(policy.named_parameters()))
    trained = list(masters.named.values())
    optimizer = torch.optim.AdamW(trained, lr=1e-6, foreach=gpu)
    of_objectives = [parameter for objective in objectives for parameter in objective.parameters.values()]
    others = [objective.optimizer for objective in objectives if objective.optimizer is not None]
    _set_gradients([*trained, *of_objectives])
    nets = [policy.net, policy.reference_model, *(objective.net for objective in objectives)]
    vocabularies = [(net, net.vocab) for net in nets if net is not None]
    seen = _VisionBytes(held, policy, *(objective.net for objective in objectives))
    steps = []
    for updating in (optimizer, *others):
        updating.step()
    for tokens, images in sizes:
        row = planned_row(policy.net.vision, vocabularies[0][1], tokens, images)
        (pack,) = pack_rows([row], tokens, share_prefixes=False)
        for net, vocabulary in vocabularies:
            net.vocab = representative_vocab(len(pack.labels), vocabulary, net.chunk_elements)
        for updating in (optimizer, *others):
            updating.zero_grad()
        seen.bytes = 0
        held.begin()
        held.peaks.clear()
        _set_gradients([*trained, *of_objectives])  # of the micro-batches before
        before = held.now
        activations = _pass(policy, objectives, train, held, pack) - before
        for updating in reversed((optimizer, *others)):
            held.begin()
            updating.step()
        held.begin()
        step = StepBytes(
            weights=_bytes(policy.model.parameters()),
            masters=_bytes(masters.copies),
            gradients=_bytes(trained),
            moments=_moments(optimizer),
            reference=0 if policy.reference_model is None else _bytes(policy.reference_model.model.parameters()),
            critic=_bytes([*(tensor for objective in objectives for tensor in objective.held()), *of_objectives])
            + sum(map(_moments, others)),
            images=seen.bytes,
            activations=activations - seen.bytes,
            trained=sum(local_of(parameter).numel() for parameter in trained),
            peaks=tuple(held.peaks),
        )
        steps.append(step)
    return steps


def _pass(
    policy: Policy, objectives: Sequence[AuxiliaryObjective], train: TrainSpec, held: AllocatedBytes, pack: Pack
) -> int:
    """Make a forward and a backward pass. Returns the bytes that are there between them."""
    reads_states = any(objective.reads_states for objective in objectives)
    logprobs, entropy, states = policy.forward_with_states(pack, entropy=True, states=reads_states)
    predicted = [objective.predict(pack, states) for objective in objectives]
    held.begin()
    between = held.now
    if train.kl.in_loss:
        policy.reference(pack)
    assert entropy is not None
    total = logprobs.sum() + entropy.sum()
    total = sum((values.sum() for values in predicted if values is not None), start=total)
    total.backward()  # type: ignore[no-untyped-call]
    return between


class RepeatedLayers:
    """The layers of a model's text decoder, as a pattern of layers that repeats between a beginning and an end.

    `copies` is the number of copies of the pattern that are there.
    """

    def __init__(self, model: Any) -> None:
        names = set(getattr(model, "_no_split_modules", None) or ())
        self._decoder = getattr(model, "get_decoder", lambda: model)()
        lists = [module for module in self._decoder.modules() if isinstance(module, nn.ModuleList)]
        blocks = (layers for layers in lists if {type(layer).__name__ for layer in layers} <= names)
        self._layers = next(blocks, nn.ModuleList())
        self._begin, self._period, self.copies = longest_repeat(list(map(self._kind, range(len(self._layers)))))

    def _kind(self, number: int) -> Any:
        """What is equal for layers that compute the same."""
        layer = self._layers[number]
        modules = []
        for name, module in layer.named_modules():
            plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
            plain.pop("layer_idx", None)
            modules.append((name, type(module), plain))
        weights = [
            (name, *(weight.shape, weight.dtype, weight.requires_grad)) for name, weight in layer.named_parameters()
        ]
        return modules, weights, [values[number] for values in self._lists().values()]

    def _lists(self) -> dict[str, list[Any]]:
        """Those of the configuration that have a value for each layer."""
        config = getattr(self._decoder, "config", None)
        named = {} if config is None else vars(config)
        return {
            key: value for key, value in named.items() if isinstance(value, list) and len(value) == len(self._layers)
        }

    def shorten(self, copies: int) -> None:
        """Leave only so many copies of the pattern."""
        second = self._begin + self._period
        dropped = slice(second, second + self._period * (self.copies - copies))
        for name, values in self._lists().items():
            setattr(self._decoder.config, name, values[: dropped.start] + values[dropped.stop :])
        del self._layers[dropped]
        self.copies = copies

    def watch(self, held: AllocatedBytes) -> None:
        """Begin a new peak where a layer begins or ends, and where its backward pass begins. Of the copies between the
        first and the last two none has the peak of all."""
        second = self._begin + self._period
        inner = range(second, second + self._period * (self.copies - 3))
        for number, layer in enumerate(self._layers):
            begin = partial(held.begin, number in inner)
            layer.register_forward_pre_hook(lambda *_given, begin=begin: begin())
            layer.register_forward_hook(partial(_begin_after, begin))


def _begin_after(begin: Callable[[], None], _layer: nn.Module, _inputs: Any, result: Any) -> None:
    begin()
    states = result[0] if isinstance(result, tuple) else result
    if states.requires_grad:
        states.register_hook(lambda _gradient: begin())


def longest_repeat(kinds: list[Any]) -> tuple[int, int, int]:
    """Where the pattern begins whose repetitions take the most places, its length, and the number of repetitions."""
    best = (0, max(len(kinds), 1), min(len(kinds), 1))
    for period in range(1, len(kinds) // 2 + 1):
        begin = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                copies = (at - begin) // period
                if period * (copies - 1) > best[1] * (best[2] - 1):
                    best = (begin, period, copies)
                begin = at - period + 1
    return best


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
