"""`engine eval`: runs a spec as an evaluation."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.exits import ERROR, errors_exit
from engine.cli.options import Json, KeepGoing, Limit, Out, Overrides, Quiet, Spec
from engine.terminal import echo, echo_json

if TYPE_CHECKING:
    from rich.console import Console

    from engine.api.runs import Run
    from engine.plugins.evaluation.measures import Evaluation


def evaluate(
    spec: Spec,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="CKPT",
            help="Another model than the spec's: a folder, a checkpoint or training, a LoRA adapter, a hub id, a name.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes per task.")] = None,
    overrides: Overrides = None,
    limit: Limit = None,
    out: Out = None,
    as_json: Json = False,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Run a spec to measure its policy: success by turn, pass@k, rewards by name, each with a 95 % interval.

    The run is stored like any other run; none of its rows is trainable. A value is the mean over tasks of each task's
    mean over its episodes, as in `engine compare`; intervals are over tasks. Episodes
    with a failure that is not the policy's are excluded and counted. For a training, the best checkpoint is used;
    a LoRA adapter is merged into a copy of the spec's model. The exit status is as for `engine run`; a run that failed
    as a whole has no estimates.
    """
    import asyncio

    from engine.cli.run import print_stopped
    from engine.cli.run_report import sources_table
    from engine.console import make_console

    if ":/" in str(spec) or any((spec / name).exists() for name in ("run.db", "run.json", "train.json")):
        echo(
            f"{spec} is a stored run, and `engine eval` runs a spec: give SPEC. `engine show RUN` has the totals of a "
            "stored run, and `engine compare RUN RUN` its measures with intervals",
            err=True,
        )
        raise typer.Exit(ERROR)
    console = make_console(stderr=as_json, soft_wrap=True)
    changes = list(overrides or ())
    if samples is not None:
        changes.append(f"rollout.samples_per_task={samples}")
    with errors_exit(ERROR):
        if model is not None:
            frozen = frozen_role_models(spec, changes)
            changes += [f"model.path={json.dumps(_other_model(console, spec, changes, model))}", *frozen]
        silent = quiet or as_json
        run, found = asyncio.run(_evaluate(console, spec, changes, limit, out, quiet=silent, keep_going=keep_going))
    result = run.result
    assert result is not None
    if as_json:
        sources = {name: asdict(sums) for name, sums in result.summary.sources.items()}
        echo_json(plain(found) | {"run": str(run.folder)} | ({"sources": sources} if sources else {}))
    else:
        print_evaluation(console, found)
        if result.summary.mix:
            console.print(sources_table(result.summary))
        console.print(f"Run: {run.folder}")
    for fault in result.faults:
        console.print(f"could not be finished: {fault}", style="red")
    print_stopped(run)
    if result.faults:
        raise typer.Exit(ERROR)


def frozen_role_models(spec: Path, changes: list[str]) -> list[str]:
    """Overrides that keep the spec's model for roles with frozen weights, as in the evaluations of the training.

    Raises:
        SpecError: the spec is invalid.
    """
    from engine.spec.added import played_roles
    from engine.spec.load import load_spec

    loaded = load_spec(spec, changes).spec
    if loaded.train is None or not loaded.backend.trains:
        return []
    own = json.dumps(loaded.model.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    return [
        f"{'.'.join(map(str, path))}.model={own}"
        for path, role in played_roles(loaded).items()
        if role.spec.model is None and role.spec.backend is None and role.spec.weights == "frozen"
    ]


def _other_model(console: Console, spec: Path, changes: list[str], model: str) -> str:
    """Return the value of `model.path`: the complete model that a path names; a hub id or a name unchanged.

    Raises:
        TrainError: The path holds no model.
        BackendError: The spec's servers sample with another model, or cannot be reached.
    """
    import asyncio

    given = Path(model).expanduser()
    if not given.is_dir():
        return model
    from engine.backends.registry import runtime_class
    from engine.plugins.evaluation.trained_model import trained_model
    from engine.spec.load import load_spec
    from engine.tokens.catalogue import resolve_model

    loaded = load_spec(spec, changes)
    own = loaded.spec.model
    backend = loaded.spec.backend
    if not backend.trains:  # this backend does not use the model's weights, only the tokenizer
        return str(given.absolute())

    folder = trained_model(given, lambda: resolve_model(own.path, own.revision, loaded.base))
    if folder != given.resolve():
        console.print(f"{given}: {folder}")
    asyncio.run(runtime_class(type(backend)).check_weights(backend, folder))
    return str(folder)


async def _evaluate(
    console: Console,
    spec: Path,
    changes: list[str],
    limit: int | None,
    out: Path | None,
    *,
    quiet: bool,
    keep_going: bool,
) -> tuple[Run, Evaluation]:
    from engine.api.launch import Launch
    from engine.api.progress import ConsoleProgress
    from engine.cli.exits import interrupted, until_signal
    from engine.cli.run import print_stopped
    from engine.plugins.evaluation.measures import evaluate as measure

    progress = ConsoleProgress(console, quiet=quiet)
    launch = Launch.of(spec, changes, limit=limit, out=out, evaluation=True, progress=progress)
    again = f"To finish it: engine run --resume {launch.store.folder}"
    run = await until_signal(partial(launch.run, progress=progress, keep_going=keep_going), again)
    result = run.result
    assert result is not None
    for note in result.notes:
        console.print(note)
    if result.stopped is not None:
        print_stopped(run)
    if result.interrupted:
        console.print(f"Interrupted. {again}")
        raise typer.Exit(interrupted())
    return run, measure(run.trajectories())


def plain(found: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON."""
    return {
        "tasks": found.tasks,
        "episodes": found.episodes,
        "masked": dict(found.masked),
        "warning": found.warning,
        "estimates": {name: estimate.plain() for name, estimate in found.estimates.items()},
    }


def print_evaluation(console: Console, found: Evaluation) -> None:
    """Print an evaluation."""
    from rich.table import Table

    table = Table("measure", "value", "95 % interval", "tasks", title="Evaluation", title_justify="left")
    for name, estimate in found.estimates.items():
        interval = f"{estimate.low:.3f} to {estimate.high:.3f}" if estimate.low == estimate.low else "–"
        table.add_row(words(name), f"{estimate.value:.3f}", interval, str(estimate.tasks))
    console.print(table)
    console.print(f"{found.episodes} episodes of {found.tasks} tasks")
    if found.warning is not None:
        console.print(f"warning: {found.warning}", style="yellow")
    if found.masked:
        listed = ", ".join(f"{kind} {count}" for kind, count in found.masked.most_common())
        console.print(f"{found.masked.total()} episodes excluded, because their failure is not the policy's: {listed}")


def words(name: str) -> str:
    """Return a measure's name in words."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return name
    return f"success by turn {rest}" if kind == "success@turn" else f"reward {rest}"
