"""What a plan of memory means for a spec: whether its longest row fits, and what to change if not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.plugins.plan.plan import MemoryPlan, plan_memory, size_of
from engine.plugins.plan.spec import PlanSpec
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.train.setup import train_spec_of
from engine.validate.model_files import model_files
from engine.validate.work import deadline

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec

RULE = "train.plan"
"""The id of the findings of `row_findings`."""
SPLITTING = (
    "One row is never split over processes here. Trainers that split a row: verl (`ulysses_sequence_parallel_size`), slime "
    "(`--context-parallel-size`); `engine validate --trainer verl` says what each would lose of the spec."
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

    It takes at most `seconds`: a plan of a model with many layers may take a minute on a busy machine. A model whose files are not here is not planned; another rule reports it. No weight is read.
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


def size_words(size: float) -> str:
    """A number of bytes, for people: `1.50 MB`."""
    for name, unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
