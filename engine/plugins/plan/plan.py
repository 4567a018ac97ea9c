"""How much memory a training takes on each process, before anything is loaded.

    plan = plan_memory(loaded, processes=8, gpu=True)
    plan.bytes                       # {"weights": ..., "gradients": ..., ...}
    plan.longest_row(80 * 10**9)     # tokens

Two steps with tensors without content are made (`planned_step.py`), which differ in their number of tokens. Kernels are
those of the CPU; what torch's allocator and CUDA itself take comes on top.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import EngineError, TrainError
from engine.plugins.plan.planned_step import PlannedImages, StepBytes, StepSize, image_tokens, largest_images, simulate
from engine.plugins.plan.spec import PlanSpec
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.terminal import size_words
from engine.tokens.loading import load_format
from engine.train.setup import train_spec_of
from engine.validate.model_files import model_files
from engine.validate.work import deadline

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.vision import Vision

_BYTES_8BIT = 2 * (1 + 4 / 256)
"""Bytes of the two moments of a parameter of `adamw_8bit`: a code each, and a scale for each block of 256."""
_GROUP = 256 << 20
"""Bytes of parameters whose moments are on the device at a time with `memory.offload: optimizer`."""
_LEAST_TEXT = 16
"""Tokens of text in a planned row with images."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one process, in bytes, at its peak in a step."""

    processes: int
    tokens: int
    """Tokens of the micro-batch: one row, of which all tokens but the first are trained."""
    row_tokens: int | None
    """The longest row that the spec's limits allow; None if they do not say."""
    bytes: dict[str, int]
    """On the device: weights, masters (float32 copies of 16-bit weights), gradients, moments, reference, critic (all of
    its own), images (pixels and activations of the vision model), activations, logits (with gathered blocks and other
    temporary tensors)."""
    cpu_bytes: int
    """Of these kinds, what `memory.offload` keeps on the CPU."""
    bytes_per_token: float
    """Growth of the peak with each further token of a micro-batch."""
    images: PlannedImages | None
    """The images of the micro-batch; None for a model without images."""
    omitted: tuple[str, ...]
    """What the plan does not count."""
    precision: str
    """The precision of the step."""

    @property
    def total(self) -> int:
        """The peak on the device."""
        return sum(self.bytes.values())

    def longest_row(self, memory: int) -> int:
        """Tokens of the longest row whose step fits into `memory` bytes of the device; 0 if no row does."""
        return max(0, self.tokens + math.floor((memory - self.total) / self.bytes_per_token))


def plan_memory(
    loaded: LoadedSpec,
    *,
    processes: int,
    gpu: bool,
    images: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> MemoryPlan:
    """Plan the memory of each process of a training.

    Args:
        loaded: The spec.
        processes: Number of processes.
        gpu: Plan for GPUs, whose blocks of logits and whose update of AdamW are larger.
        images: Images of a micro-batch. Default: `limits.images`, else `model.max_images`, else 1.
        image_size: Width and height of an image. Default: as large as fits into the micro-batch.

    Raises:
        TrainError: kind `train_setup`: the model cannot be trained, or gets no images.
        ModelError: the model's files cannot be found.
    """
    spec, train = loaded.spec, train_spec_of(loaded)
    train = train.model_copy(update={"precision": train.precision_on("cuda" if gpu else "cpu")})
    format = load_format(spec.model, loaded.base)
    if format.vision is None and (images, image_size) != (None, None):
        raise TrainError(f"the model {spec.model.path} gets no images, so none can be planned", kind="train_setup")
    count = images or spec.limits.images or spec.model.max_images or 1
    tokens = max(train.memory.max_tokens_per_microbatch, spec.limits.episode_tokens or 0, 4)
    larger = _size_of(format.vision, tokens, count, image_size)
    smaller = _size_of(format.vision, max(tokens // 2, 2), count, image_size)
    if smaller[0] >= larger[0]:  # the images fill both
        smaller = (larger[0] - _LEAST_TEXT // 2, larger[1])
    large, small = simulate(loaded, train, format, [larger, smaller], processes=processes, gpu=gpu)
    slope = (large.peak - small.peak) / (larger[0] - smaller[0])
    return _plan(loaded, train, processes, larger, large, max(slope, 1.0), gpu=gpu)


def _size_of(vision: Vision | None, tokens: int, count: int, image_size: tuple[int, int] | None) -> StepSize:
    """A micro-batch of `tokens` tokens, or as many as its images need."""
    if vision is None:
        return tokens, None
    if image_size is None:
        images = largest_images(vision, count, tokens - _LEAST_TEXT)
    else:
        images = PlannedImages(count, *image_size)
    return max(tokens, image_tokens(vision, images) + _LEAST_TEXT), images


def _plan(
    loaded: LoadedSpec,
    train: TrainSpec,
    processes: int,
    size: StepSize,
    whole: StepBytes,
    slope: float,
    *,
    gpu: bool,
) -> MemoryPlan:
    """The plan from the bytes of a step."""
    held = {
        name: getattr(whole, name) for name in ("weights", "masters", "gradients", "moments", "reference", "critic")
    }
    rest = whole.peak - sum(held.values())
    images = min(whole.images, rest)
    activations = min(whole.activations, rest - images)
    if train.optimizer.kind == "adamw_8bit":
        held["moments"] = math.ceil(whole.trained * _BYTES_8BIT)
    stays: tuple[str, ...] = {"none": (), "optimizer": ("moments",), "all": tuple(held)}[train.memory.offload]
    if train.critic is not None and not train.critic.own_model:
        stays = tuple(name for name in stays if name != "critic")  # a head is not sharded
    on_cpu = sum(held[name] for name in stays)
    if train.memory.offload == "optimizer":
        rest += min(held["moments"], 2 * _GROUP)
    on_device = {name: 0 if name in stays else size_of_kind for name, size_of_kind in held.items()}
    return MemoryPlan(
        processes,
        size[0],
        loaded.spec.limits.episode_tokens,
        on_device | {"images": images, "activations": activations, "logits": rest - activations - images},
        on_cpu,
        slope,
        size[1],
        ("what torch's allocator and CUDA take",) if gpu else (),
        train.precision,
    )


def size_of(text: str) -> tuple[int, int]:
    """Width and height of an image, from `1280x720`.

    Raises:
        ValueError: it is no size.
    """
    sides = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if sides is None:
        raise ValueError(f"{text!r} is not a size of an image; write 1280x720")
    return int(sides[1]), int(sides[2])


RULE = "train.plan"
"""The id of the findings of `row_findings`."""
SPLITTING = (
    "One row is never split over processes here. Trainers that split a row: verl (`ulysses_sequence_parallel_size`), "
    "slime (`--context-parallel-size`); `engine validate --trainer verl` says what each would lose of the spec."
)


def what_saves(plan: MemoryPlan, train: TrainSpec, longest: int) -> list[str]:
    """Settings that make a step smaller. `longest`: tokens of the longest row that fits."""
    options = [f"more processes than {plan.processes}"]
    if plan.row_tokens is None or plan.row_tokens <= longest:
        options.insert(0, f"`train.memory.max_tokens_per_microbatch: {longest}`" if longest else "a smaller model")
    if not train.memory.gradient_checkpointing:
        options.append("`train.memory.gradient_checkpointing: true`")
    # an adapter computes in float32 beside a model of bfloat16, so there autocast keeps less
    smaller = "bfloat16" if train.adapter is None else "mixed"
    if plan.precision not in ("bfloat16", smaller):
        options.append(f"`train.precision: {smaller}`")
    if train.optimizer.kind == "adamw":
        options.append("`train.optimizer.kind: adamw_8bit`")
    if train.memory.offload != "all":
        options.append("`train.memory.offload: all`")
    if train.adapter is None:
        options.append("`train.lora`")
    return options


def row_findings(loaded: LoadedSpec, seconds: float) -> Iterator[Diagnostic]:
    """Compare the longest row and the micro-batch of a spec with the memory of `train.plan`, if it is set.

    It takes at most `seconds`: a plan takes several, and more where few layers of a model repeat. A model whose files
    are not here is not planned; another rule reports it. No weight is read.
    """
    wanted = None if loaded.spec.train is None else PlanSpec.section_of(loaded.spec.train)
    files = None if wanted is None else model_files(loaded)
    if wanted is None or files is None or not files.config:
        return
    try:
        train = train_spec_of(loaded)
        size = None if wanted.image_size is None else size_of(wanted.image_size)
        with deadline(seconds):
            plan = plan_memory(
                loaded,
                processes=wanted.processes,
                gpu=train.device != "cpu",
                images=wanted.images,
                image_size=size,
            )
    except EngineError as error:
        yield _finding(loaded, f"the memory of a step cannot be planned: {error}", ("train", "plan"), "see the message")
        return
    except TimeoutError:
        message = f"the memory of a step was not planned within {seconds:g} s"
        fix = "run `engine plan SPEC`, which has no time limit, or set --timeout"
        yield _finding(loaded, message, ("train", "plan"), fix)
        return
    longest, memory = plan.longest_row(wanted.gpu_memory), size_words(wanted.gpu_memory)
    where = f"{memory} of each of {plan.processes} GPUs" if plan.processes > 1 else f"the {memory} of a GPU"
    smaller = ", ".join(what_saves(plan, train, longest))
    limited = plan.row_tokens is not None
    row = plan.row_tokens or files.context or 0
    if row > longest:
        said = (
            f"`limits.episode_tokens` is {row:,}"
            if limited
            else f"rows may be as long as the model's context, {row:,} tokens"
        )
        message = f"{said}, and the longest row whose step fits into {where} has {longest:,} tokens"
        path: DataPath = ("limits", "episode_tokens") if limited else ("train", "plan")
        lower = f"set `limits.episode_tokens` to {longest} or less; or " if longest else ""
        yield _finding(loaded, message, path, f"{lower}make the step smaller: {smaller}. {SPLITTING}")
    elif train.memory.max_tokens_per_microbatch > longest:
        message = (
            f"a micro-batch has up to {train.memory.max_tokens_per_microbatch:,} tokens "
            f"(`train.memory.max_tokens_per_microbatch`), and {longest:,} fit into {where}"
        )
        yield _finding(loaded, message, ("train", "plan"), f"make the step smaller: {smaller}")


def _finding(loaded: LoadedSpec, message: str, path: DataPath, fix: str) -> Diagnostic:
    return Diagnostic(RULE, "warning", message, fix, loaded.origin(path), path)
