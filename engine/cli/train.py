"""`engine train`: episodes, credit, an update, new weights; again and again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, wrong_usage
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.run import Runner
    from engine.spec.load import LoadedSpec
    from engine.train.distributed import ProcessGroup
    from engine.train.trainer import TrainResult


def train(
    spec: Annotated[
        Path | None, typer.Argument(help="The episode spec, with a `train:` section. Left out with --resume.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set train.steps=50")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder that trainings are stored under; the spec's `rollout.out` when left out."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="TRAINING", help="Go on with this one: a folder, an id or its beginning, or `latest`."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on where the first 16 episodes all fail in one way.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the end.")] = False,
) -> None:
    """Train the spec's model on its own episodes.

    Weights, optimizer, random state and the place among the tasks are kept in checkpoints; --resume goes on from the
    newest. Exit status: 0 when the last step is done; 1 when training cannot begin or go on; 2 when the command line is
    wrong; 3 when no server can be reached at the start, none replies for `backend.wait`, or the first 16 episodes all fail
    in one way; 130 after Ctrl-C.
    """
    from engine.cli.console import make_console
    from engine.errors import EngineError, FailingError
    from engine.logs import configure_logging
    from engine.train import folder as folders

    configure_logging()
    console = make_console(soft_wrap=True)
    folder: Path | None = None
    try:
        from engine.train.distributed import join_process_group

        process_group = join_process_group()
        if not process_group.main:
            _follow(process_group, spec, list(overrides or ()), out, resume)
            return
        loaded, folder = _prepare(console, spec, list(overrides or ()), out, resume)
        began = time.perf_counter()
        result = asyncio.run(_drive(loaded, folder, process_group, console, quiet=quiet, keep_going=keep_going))
        process_group.close()
    except EngineError as error:
        echo(str(error), err=True)
        if isinstance(error, FailingError):
            echo(error.cause, err=True)
        if folder is not None and (resume is not None or not folders.discard(folder)):
            _pictures(folder, console)
            console.print(f"Kept so far: {folder}\nTo go on: engine train --resume {folder}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    _conclude(result, folder, console, time.perf_counter() - began)


def _follow(
    process_group: ProcessGroup, spec: Path | None, overrides: list[str], out: Path | None, resume: str | None
) -> None:
    """In every process but the first. Ctrl-C and a launcher's SIGTERM reach them all: what they mean is process 0's to say."""
    import signal

    from engine.spec.load import load_spec
    from engine.train import folder as folders
    from engine.train.setup import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if resume is not None:
        follow(
            folders.read_header(folders.find_training(resume, out or Path("runs"))).loaded_spec(strict=True),
            process_group,
        )
    elif spec is not None:
        follow(load_spec(spec, overrides), process_group)


def _prepare(
    console: Console, spec: Path | None, overrides: list[str], out: Path | None, resume: str | None
) -> tuple[LoadedSpec, Path]:
    """The spec, checked, and the training's folder."""
    from engine.checks import check_spec
    from engine.errors import SpecError
    from engine.spec.load import load_spec
    from engine.store.header import RunHeader, new_run_id
    from engine.train import folder as folders
    from engine.train.setup import train_spec_of

    if resume is not None:
        if spec is not None or overrides:
            wrong_usage("--resume goes on as it was begun; leave out SPEC and --set")
        found = folders.find_training(resume, out or Path("runs"))
        return folders.read_header(found).loaded_spec(strict=True), found
    if spec is None:
        wrong_usage("give a spec to train, or --resume TRAINING")
    loaded = load_spec(spec, overrides)
    told = check_spec(loaded)
    errors = [item for item in told if item.severity == "error"]
    if errors:
        raise SpecError(errors)
    for item in told:
        if item.severity == "warning":
            console.print(str(item), style="yellow")
    train_spec_of(loaded)
    header = RunHeader.of(loaded, overrides=overrides, run_id=new_run_id(f"{loaded.spec.name}-train"))
    return loaded, folders.begin(out or Path(loaded.spec.rollout.out), header)


async def _drive(
    loaded: LoadedSpec, folder: Path, process_group: ProcessGroup, console: Console, *, quiet: bool, keep_going: bool
) -> TrainResult:
    from engine.cli.stopping import stop_on_signals
    from engine.cli.train_panel import TrainPanel, shown
    from engine.train.setup import train_spec_of
    from engine.train.trainer import Trainer

    stop = asyncio.Event()
    panel = TrainPanel(train_spec_of(loaded).steps)

    def watch(runner: Runner) -> None:
        panel.live = runner.live

    trainer = Trainer(
        loaded,
        folder,
        process_group=process_group,
        tell=panel.update,
        phase=panel.phase,
        watch=watch,
        keep_going=keep_going,
    )
    hint = f"To go on: engine train --resume {folder}"
    with stop_on_signals(stop, hint), shown(panel, console, quiet=quiet):
        return await trainer.run(stop=stop)


def _conclude(result: TrainResult, folder: Path, console: Console, seconds: float) -> None:
    from engine.cli.stopping import interrupted

    before, after = result.first.get("reward/mean"), result.last.get("reward/mean")
    if before is not None and after is not None:
        console.print(
            f"{result.steps} steps; reward {before:.3f} in this launch's first step, {after:.3f} in the last; "
            f"{seconds / 60:.1f} min"
        )
    if result.best is not None:
        console.print(f"Best evaluation: {result.best:.3f} after step {result.best_step}")
    _pictures(folder, console)
    for fault in result.faults:
        console.print(f"could not be finished: {fault}", style="red")
    console.print(f"Training: {folder}")
    if result.checkpoint is not None:
        console.print(f"Checkpoint: {result.checkpoint}")
    if result.interrupted:
        console.print(f"Interrupted. To go on: engine train --resume {folder}")
        raise typer.Exit(interrupted())
    if result.faults:
        raise typer.Exit(ERROR)


def _pictures(folder: Path, console: Console) -> None:
    from engine.errors import EngineError
    from engine.train.plots import draw

    try:
        drawn = draw(folder)
    except EngineError as error:
        console.print(f"no pictures: {error}")
        return
    if drawn:
        console.print(f"Pictures: {drawn[0].parent}")
