"""`engine train`: the command line of a training."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, wrong_usage
from engine.cli.options import KeepGoing, Out, Overrides, Quiet
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.counters import RunCounters
    from engine.spec.load import LoadedSpec
    from engine.train.distributed import ProcessGroup
    from engine.train.step_source import TrainResult


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
    import asyncio

    from engine.console import make_console
    from engine.errors import EngineError, FailingError
    from engine.logs import configure_logging
    from engine.store import training as folders

    configure_logging()
    console = make_console(soft_wrap=True)
    folder: Path | None = None
    try:
        from engine.train.distributed import join_process_group

        process_group = join_process_group()
        if not process_group.main:
            _follow(process_group, spec, list(overrides or ()), out, resume)
            return
        loaded, folder = _prepare(console, spec, list(overrides or ()), out, resume, run_name)
        began = time.perf_counter()
        result = asyncio.run(_train(loaded, folder, process_group, console, quiet=quiet, keep_going=keep_going))
        process_group.close()
    except EngineError as error:
        echo(str(error), err=True)
        if isinstance(error, FailingError):
            echo(error.cause, err=True)
        if folder is not None and (resume is not None or not folders.discard(folder)):
            console.print(
                f"Training: {folder}\nTo continue: engine train --resume {folder} {error.resume_words}".rstrip()
            )
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    _print_result(result, folder, console, time.perf_counter() - began)


def _follow(
    process_group: ProcessGroup, spec: Path | None, overrides: list[str], out: Path | None, resume: str | None
) -> None:
    """Run a process other than process 0. It ignores Ctrl-C and SIGTERM, which a launcher sends to all; process 0
    handles them."""
    import signal

    from engine.spec.load import load_spec
    from engine.store import training as folders
    from engine.train.setup import follow, with_precision

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if spec is not None:
        follow(with_precision(load_spec(spec, overrides)), process_group)
    elif resume is not None:
        follow(_changed(folders.find_training(resume, out or Path("runs")), overrides), process_group)


def _changed(folder: Path, overrides: list[str]) -> LoadedSpec:
    """Load the spec of a training, with the values that a resume changes."""
    from engine.spec.load import override_spec
    from engine.store import training as folders
    from engine.train.setup import with_precision

    loaded = folders.read_header(folder).loaded_spec(strict=True)
    return with_precision(override_spec(loaded, overrides), loaded.spec) if overrides else loaded


def _prepare(
    console: Console,
    spec: Path | None,
    overrides: list[str],
    out: Path | None,
    resume: str | None,
    run_name: str | None,
) -> tuple[LoadedSpec, Path]:
    """Load and check the spec, and make or find the training's folder."""
    from engine.spec.load import load_spec
    from engine.store import training as folders
    from engine.store.header import RunHeader, new_run_id
    from engine.train.setup import train_spec_of, with_precision

    if run_name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name):
        wrong_usage(
            f"--run-name {run_name!r}: use letters, digits, `.`, `_` and `-`, and begin with a letter or a digit"
        )
    if resume is not None and resume != "auto":
        if spec is not None or run_name is not None:
            wrong_usage("--resume TRAINING continues the training's own spec: leave out SPEC and --run-name")
        training = folders.find_training(resume, out or Path("runs"))
        loaded = _changed(training, overrides)
        _continue(console, training, loaded, overrides)
        return loaded, training
    if spec is None or (resume == "auto" and run_name is None):
        wrong_usage("give a spec to train, or --resume TRAINING; --resume auto takes SPEC and --run-name")
    loaded = load_spec(spec, overrides)
    folder = out or Path(loaded.spec.rollout.out)
    begun = folders.named(run_name, folder) if run_name is not None else None
    if begun is not None and resume is None:
        wrong_usage(f"the training {begun} exists: --resume auto continues it")
    if begun is not None:
        loaded = with_precision(loaded, folders.read_header(begun).loaded_spec().spec)
        _continue(console, begun, loaded, overrides)
        return loaded, begun
    _check(console, loaded)
    loaded = with_precision(loaded)
    train_spec_of(loaded)
    name = run_name or new_run_id(f"{loaded.spec.name}-train")
    return loaded, folders.begin(folder, RunHeader.of(loaded, overrides=overrides, run_id=name))


def _continue(console: Console, folder: Path, loaded: LoadedSpec, overrides: list[str]) -> None:
    """Check what a resume changes in a training's spec, and write it into the training's header."""
    from engine.errors import TrainError
    from engine.store import training as folders
    from engine.store.header import RunHeader
    from engine.store.lock import is_held
    from engine.train.setup import check_changes

    header = folders.read_header(folder)
    changed = check_changes(header.loaded_spec(strict=True).spec, loaded.spec)
    if not changed:
        return
    if is_held(folder) or is_held(folder / folders.ROLLOUTS):
        raise TrainError(f"another process trains in {folder}: wait until it ends, or stop it", kind="train_setup")
    _check(console, loaded)
    new = RunHeader.of(loaded, overrides=[*header.overrides, *overrides], run_id=header.run_id)
    folders.change_header(folder, new.model_copy(update={"created": header.created}))
    console.print(f"Changed: {', '.join(changed)}")


def _check(console: Console, loaded: LoadedSpec) -> None:
    """Check a spec with the rules of `engine validate`, and print its warnings.

    Raises:
        SpecError: a rule found an error.
    """
    from engine.runner.processes import processes_of
    from engine.validate import refuse_errors

    if (processes := processes_of(loaded)) is not None:
        processes.refuse_training()
    for item in refuse_errors(loaded):
        console.print(str(item), style="yellow")


async def _train(
    loaded: LoadedSpec, folder: Path, process_group: ProcessGroup, console: Console, *, quiet: bool, keep_going: bool
) -> TrainResult:
    import asyncio

    from engine.api.train_panel import TrainPanel, shown
    from engine.cli.exits import stop_on_signals
    from engine.train.setup import train_spec_of
    from engine.train.trainer import Trainer

    stop = asyncio.Event()
    train = train_spec_of(loaded)
    panel = TrainPanel(train.steps)

    def watch(live: RunCounters) -> None:
        panel.live = live

    trainer = Trainer(
        loaded,
        folder,
        process_group=process_group,
        on_step=panel.update,
        phase=panel.phase,
        watch=watch,
        keep_going=keep_going,
    )
    hint = f"To continue: engine train --resume {folder}"
    try:
        with stop_on_signals(stop, hint, train.checkpoints.grace), shown(panel, console, quiet=quiet):
            return await trainer.run(stop=stop)
    finally:
        for line in trainer.last_lines:
            console.print(line)


def _print_result(result: TrainResult, folder: Path, console: Console, seconds: float) -> None:
    from engine.cli.exits import interrupted

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
    if result.missing_signal:
        console.print(result.missing_signal, style="red")
    if result.interrupted:
        console.print(f"Interrupted. To continue: engine train --resume {folder}")
        raise typer.Exit(interrupted())
    if result.faults:
        raise typer.Exit(ERROR)
