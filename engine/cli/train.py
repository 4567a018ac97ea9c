"""`engine train`: the command line of a training."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, wrong_usage
from engine.cli.options import KeepGoing, Out, Overrides, Quiet
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine import ConsoleProgress, Training, TrainingLaunch

_RESUMED = {
    "rollout/resumed_episodes": "episodes continued at their turn",
    "rollout/regenerated_tokens": "tokens sampled again",
    "rollout/dropped_stale_groups": "groups dropped as too stale",
}


def train(
    spec: Annotated[
        Path | None,
        typer.Argument(help="The episode spec, with a `train:` section. Omit it with --resume TRAINING."),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="TRAINING",
            help="Continue this training: a folder, an id, the start of an id, or `latest`. `auto`, with SPEC and "
            "--run-name: "
            "continue the training of that name, or start it if there is none.",
        ),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the training's folder. Default: from the spec's name and the time."),
    ] = None,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Train the spec's model on its own episodes, or with `train.kind: sft` on episodes that were exported.

    --resume continues where the training ended, also after `kill -9`: from the newest checkpoint, the batch log and the
    episodes in the store. Episodes that were running continue at their turn. With it --set changes steps, learning rate
    and schedule, time limits, evaluation, checkpoints and reports.

    Exit status: 0 when the last step is done;
    1 when the training cannot start or continue; 2 when the command line is wrong; 3 when no server can be reached at
    the start, none replies for `backend.wait`, the training has cost `rollout.max_cost`, or the first 16 episodes all
    fail with one cause; 130 after Ctrl-C; 143 after SIGTERM.
    """
    from engine import ConsoleProgress, TrainingLaunch
    from engine.cli.exits import errors_exit
    from engine.console import make_console

    if resume is not None and resume != "auto":
        if spec is not None or run_name is not None:
            wrong_usage("--resume TRAINING continues the training's own spec: leave out SPEC and --run-name")
    elif spec is None or (resume == "auto" and run_name is None):
        wrong_usage("give a spec to train, or --resume TRAINING; --resume auto takes SPEC and --run-name")
    progress = ConsoleProgress(make_console(soft_wrap=True), quiet=quiet)
    with errors_exit(ERROR):
        launch = TrainingLaunch.of(spec, overrides or (), out=out, resume=resume, name=run_name, progress=progress)
    began = time.perf_counter()
    training = _run(launch, progress, keep_going=keep_going)
    _print_result(training, progress.console, time.perf_counter() - began)


def _run(launch: TrainingLaunch, progress: ConsoleProgress, *, keep_going: bool) -> Training:
    """Train to the end, or until a signal."""
    import asyncio

    from engine.cli.exits import until_signal
    from engine.errors import EngineError, FailingError

    run = partial(launch.run, keep_going=keep_going, progress=progress)
    hint = f"To continue: engine train --resume {launch.folder}"
    try:
        return asyncio.run(until_signal(run, hint, launch.train.checkpoints.grace))
    except EngineError as error:
        echo(str(error), err=True)
        if isinstance(error, FailingError):
            echo(error.cause, err=True)
        if launch.folder.exists():
            progress.console.print(
                f"Training: {launch.folder}\nTo continue: engine train --resume {launch.folder} "
                f"{error.resume_words}".rstrip()
            )
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None


def _print_result(training: Training, console: Console, seconds: float) -> None:
    from engine.cli.exits import interrupted

    result, folder = training.result, training.folder
    assert result is not None
    before, after = result.first.get("reward/mean"), result.last.get("reward/mean")
    if before is not None and after is not None:
        console.print(
            f"{result.steps} steps; reward {before:.3f} in this launch's first step, {after:.3f} in the last; "
            f"{seconds / 60:.1f} min"
        )
    elif "loss" in result.first:
        console.print(
            f"{result.steps} steps; loss {result.first['loss']:.4f} in this launch's first step, "
            f"{result.last['loss']:.4f} in the "
            f"last; {seconds / 60:.1f} min"
        )
    parts = [f"{count} {words}" for name, words in _RESUMED.items() if (count := result.resumed[name])]
    if result.repeated_steps:
        parts.insert(0, f"{result.repeated_steps} steps after the checkpoint repeated from stored episodes")
    if parts:
        console.print(f"Resumed: {', '.join(parts)}")
    if result.best is not None:
        console.print(f"Best evaluation: {result.best:.3f} after step {result.best_step}")
    if result.cost is not None:
        console.print(f"Cost of the training: {result.cost.spent:.6g}, with its evaluations and unfinished episodes")
    for fault in result.faults:
        console.print(f"could not be finished: {fault}", style="red")
    console.print(f"Training: {folder}")
    if result.checkpoint is not None:
        console.print(f"Checkpoint: {result.checkpoint}")
    if result.model is not None:
        console.print(f"Model: {result.model}")
    if result.interrupted:
        console.print(f"Interrupted. To continue: engine train --resume {folder}")
        raise typer.Exit(interrupted())
    if result.faults:
        raise typer.Exit(ERROR)
