"""`engine plan`: the memory of a training, by kind, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, errors_exit, wrong_usage
from engine.cli.options import Overrides, Spec
from engine.terminal import size_words

if TYPE_CHECKING:
    from engine.plugins.plan.plan import MemoryPlan
    from engine.schemas.train import TrainSpec

_WORDS = {
    "weights": "weights",
    "masters": "float32 master weights",
    "gradients": "gradients",
    "moments": "AdamW's moments",
    "reference": "KL reference",
    "critic": "critic: weights, gradients, moments",
    "images": "images: pixels, activations of the vision model",
    "activations": "activations, with gathered weights",
    "logits": "logits and other temporary tensors",
}


def plan(
    spec: Spec,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The number of processes. Default: that of `train.plan`, else 1."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a GPU, such as 80GB. Prints the longest row that fits, and exits with 1 if a step does "
            "not. "
            "Default: that of `train.plan`.",
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Images of a micro-batch. Default: `limits.images`, else 1."),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(metavar="WxH", help="Size of these images, such as 1280x720. Default: as large as fits."),
    ] = None,
) -> None:
    """Print the memory of each process of a training at the peak of a step, and load nothing.

    Exit status: 0; 1 when the spec is not valid, or memory is given and a step, or the longest row, does not fit; 2
    when the command line is wrong.
    """
    from engine.cli.validate.command import collections_paused
    from engine.schemas.base import parse_bytes

    try:
        most = None if memory is None else int(parse_bytes(memory))
    except ValueError as error:
        wrong_usage(f"--memory: {error}")
    with collections_paused():
        _print_plan(spec, overrides or [], processes, most, images, image_size)


def _print_plan(
    spec: Path,
    overrides: list[str],
    processes: int | None,
    most: int | None,
    images: int | None,
    image_size: str | None,
) -> None:
    """Print the plan of a spec. What is None is that of `train.plan`."""
    from engine.console import make_console
    from engine.plugins.plan.plan import plan_memory, size_of
    from engine.plugins.plan.spec import PlanSpec
    from engine.spec.load import load_spec
    from engine.train.setup import train_spec_of
    from engine.validate.train import FLOAT32_ON_GPU

    try:
        size = None if image_size is None else size_of(image_size)
    except ValueError as error:
        wrong_usage(f"--image-size: {error}")
    with errors_exit(ERROR):
        loaded = load_spec(spec, overrides)
        train = train_spec_of(loaded)
        if (machine := PlanSpec.section_of(train)) is not None:
            processes, most = processes or machine.processes, most or machine.gpu_memory
            images = images or machine.images
            size = size or (None if machine.image_size is None else size_of(machine.image_size))
        gpu = most is not None and train.device != "cpu"
        planned = plan_memory(loaded, processes=processes or 1, gpu=gpu, images=images, image_size=size)
    console = make_console(soft_wrap=True)
    for line in plan_lines(planned, gpu=gpu):
        console.print(line)
    if gpu and planned.precision == "float32":
        console.print(FLOAT32_ON_GPU, style="yellow")
    if most is None:
        return
    fits, lines = fit_lines(planned, train, most)
    for line in lines:
        console.print(line, style=None if fits else "red")
    if not fits:
        raise typer.Exit(ERROR)


def plan_lines(plan: MemoryPlan, *, gpu: bool) -> list[str]:
    """The plan as lines of text."""
    several = f"each of {plan.processes} processes" if plan.processes > 1 else "the process"
    seen = "" if plan.images is None else f" with {plan.images}"
    lines = [
        f"Memory of {several} at the peak of a step, with a micro-batch of one row of {plan.tokens:,} tokens{seen}:"
    ]
    lines += [f"  {size_words(size):>10}  {_WORDS[name]}" for name, size in plan.bytes.items() if size]
    lines.append(
        f"  {size_words(plan.total):>10}  together; each further token of a micro-batch takes "
        f"{size_words(plan.bytes_per_token)}"
    )
    if plan.cpu_bytes:
        lines.append(f"  {size_words(plan.cpu_bytes):>10}  on the CPU (`train.memory.offload`)")
    lines.append(f"Precision: {plan.precision}, on {'a GPU' if gpu else 'a CPU; --memory plans for a GPU'}")
    if plan.omitted:
        lines.append(f"Not counted: {'; '.join(plan.omitted)}")
    return lines


def fit_lines(plan: MemoryPlan, train: TrainSpec, memory: int) -> tuple[bool, list[str]]:
    """Whether a step fits into `memory` bytes, and what to say about it."""
    from engine.plugins.plan.plan import SPLITTING, what_saves

    longest = plan.longest_row(memory)
    lines = [f"In {size_words(memory)}: the longest row, and the largest micro-batch, has {longest:,} tokens"]
    if longest >= plan.tokens:
        return True, lines
    reach = f"`limits.episode_tokens` is {plan.row_tokens:,}" if plan.row_tokens is not None else "rows may be longer"
    lines.append(
        f"A micro-batch of {plan.tokens:,} tokens does not fit (`train.memory.max_tokens_per_microbatch` "
        f"{train.memory.max_tokens_per_microbatch:,}; {reach})."
    )
    lines.append(f"What makes it smaller: {', '.join(what_saves(plan, train, longest))}.")
    if plan.row_tokens is not None and plan.row_tokens > longest:
        lines.append(SPLITTING)
    return False, lines
