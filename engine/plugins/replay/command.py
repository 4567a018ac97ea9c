"""`engine replay` and `engine rescore`: stored episodes once more, without a model: rebuilt from their journals, or
with other reward rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, errors_exit
from engine.cli.options import Overrides, RunsFolder, StoredRun

if TYPE_CHECKING:
    from rich.console import Console

    from engine.plugins.replay.rescore import Rescored
    from engine.runner.replay import Replayed
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store import RunStore
    from engine.store.reader import RunReader

_CHANGED = 10
"""Number of changed episodes that `engine rescore` lists."""


def replay(
    run: StoredRun,
    episode: Annotated[str | None, typer.Argument(help="One episode; by default all finished ones.")] = None,
    from_turn: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Fork: keep the entries before turn K, and sample again from there."),
    ] = None,
    salt: Annotated[
        int, typer.Option(min=0, help="With --from-turn: changes the sampling seeds; 0 uses the run's own.")
    ] = 1,
    out: RunsFolder = Path("runs"),
) -> None:
    """Rebuild finished episodes from their journals, and compare them with the stored ones, byte for byte.

    Runs code that the run names: formats of tool calls, actions, and environments whose tools stand in the prompt.

    Exits with 0 if every episode is the same, and 1 if one differs: the spec, the tokenizer or the engine has changed.

    With --from-turn K a new run is made instead: each episode begins with the old journal's entries before turn K
    and continues with the backend. An episode without a turn K is copied unchanged.
    """
    import asyncio

    from engine.console import make_console

    if from_turn is not None:
        if episode is not None:
            raise typer.BadParameter("--from-turn forks a whole run; leave out EPISODE")
        _fork(run, out, from_turn, salt)
        return
    console = make_console()
    with errors_exit(ERROR):
        results, dropped = asyncio.run(_replay(run, episode, out))
    differing = [result for result in results if result.difference is not None]
    for result in differing:
        console.print(f"{result.episode_id}: {result.difference}", style="red")
    tokens = sum(result.tokens for result in results)
    console.print(
        f"{len(results)} episodes, {tokens} tokens replayed: {len(results) - len(differing)} the same to the byte"
    )
    if dropped:
        console.print(dropped, style="yellow")
    if differing:
        raise typer.Exit(ERROR)


async def _replay(run: str, episode: str | None, out: Path) -> tuple[list[Replayed], str]:
    from engine.runner.replay import Replayer
    from engine.store import RunStore, find_run
    from engine.store.dropped import dropped_words
    from engine.tokens.loading import load_format

    store = RunStore.open(find_run(run, out=out), readonly=True)
    store.header.need_plugins()
    store.header.need_objects()
    loaded = store.header.loaded_spec()
    replayer = Replayer(loaded, load_format(loaded.spec.model, loaded.base), store)
    try:
        stored = [store.trajectory(episode)] if episode is not None else store.trajectories()
        results = [await replayer.check(trajectory, store.task(trajectory.task_id)) for trajectory in stored]
        return results, "" if episode is not None else dropped_words(store)
    finally:
        replayer.close()
        store.close()


def _fork(run: str, out: Path, turn: int, salt: int) -> None:
    """Fork a run at a turn, and run the new run to its end."""
    from engine.api.launch import Launch
    from engine.api.progress import ConsoleProgress
    from engine.cli.run import conclude
    from engine.console import make_console
    from engine.store import RunStore, find_run

    with errors_exit(ERROR), RunStore.open(find_run(run, out=out), readonly=True) as source:
        loaded, tasks, store = fork(source, out, turn, salt)
    conclude(Launch(loaded, tasks, store), ConsoleProgress(make_console()))


def fork(source: RunReader, out: Path, turn: int, salt: int) -> tuple[LoadedSpec, TaskList, RunStore]:
    """Begin a fork of a run.

    Args:
        source: The run.
        out: The folder in which runs are stored.
        turn: Episodes share the entries before this assistant turn, from 0. An episode without this turn is copied
            completely; if it had ended, it is only finished.
        salt: Changes the sampling seeds from this turn on; 0 keeps them.

    Returns:
        (spec, tasks, store), the arguments of `Runner`. The store is open for writing.

    Raises:
        StoreError: the run is one of several processes, or the new run cannot be written.
        EngineError: the tasks cannot be read.
    """
    from dataclasses import replace

    from engine.errors import StoreError
    from engine.runner.processes import refuse_many
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore
    from engine.store.header import Fork

    loaded = source.header.loaded_spec(strict=True)
    refuse_many(loaded, "a fork")
    if source.divided:
        raise StoreError(
            f"{source.shards_only or source.folder} is a run of several drivers; forks of such runs are not supported"
        )
    rollout = loaded.spec.rollout.model_copy(update={"salt": salt})
    loaded = replace(loaded, spec=loaded.spec.model_copy(update={"rollout": rollout}))
    tasks = load_tasks(loaded)
    changes = [*source.header.overrides, f"rollout.salt={salt}"]
    header = RunHeader.of(loaded, overrides=changes, fork=Fork(run=source.run_id, turn=turn))
    return loaded, tasks, RunStore.create(out, header, source)


def rescore(
    run: StoredRun,
    spec: Annotated[Path, typer.Option("--spec", help="The spec whose `rewards` are used.")],
    overrides: Overrides = None,
    label: Annotated[str | None, typer.Option(help="Label of the score; by default the spec file's name.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing score with this label.")] = False,
    out: RunsFolder = Path("runs"),
) -> None:
    """Score stored episodes with another spec's rewards. No model is called: the rules are applied to the journals.

    The results of the run's own rules are kept; `engine show` and `engine export` take --score LABEL. A rule that
    cannot be applied to an episode, or that would have led to another event, is a failure of that episode's score. Runs
    code that the run names, as `engine replay` does.
    """
    import asyncio

    from engine.console import make_console

    console = make_console(soft_wrap=True)
    with errors_exit(ERROR):
        work = _rescore(run, spec, list(overrides or ()), label or spec.stem, out, replace)
        result, folder, dropped = asyncio.run(work)
    _report(console, result, folder)
    if dropped:
        console.print(dropped, style="yellow")


async def _rescore(
    run: str, path: Path, overrides: list[str], label: str, out: Path, replace: bool
) -> tuple[Rescored, Path, str]:
    from engine.errors import StoreError
    from engine.plugins.replay.rescore import rescore as score
    from engine.spec.load import load_spec
    from engine.store import RunStore, find_run
    from engine.store.dropped import dropped_words
    from engine.store.find import is_divided
    from engine.tokens.loading import load_format
    from engine.validate import refuse_errors

    loaded = load_spec(path, overrides)
    refuse_errors(loaded)
    folder = find_run(run, out=out)
    if is_divided(folder):
        raise StoreError(
            f"{run} is a sharded run: a score is written into the store of a run, and this one has many. Export its "
            "rows with another `rewards.credit` by `engine export --credit`, or run it with one driver"
        )
    with RunStore.open(folder) as store:
        own = store.header.loaded_spec()
        chat_format = load_format(own.spec.model, own.base)
        result = await score(store, loaded, chat_format, label, replace_label=replace)
        return result, store.folder, dropped_words(store)


def _report(console: Console, result: Rescored, folder: Path) -> None:
    failed = sum(result.failures.values())
    count = max(result.episodes, 1)
    console.print(
        f"{result.episodes} episodes scored as `{result.label}`: {len(result.changed)} changed, {failed} failed · "
        f"mean reward {result.before / count:+.3f} -> {result.after / count:+.3f}"
    )
    for episode, before, after in sorted(result.changed, key=lambda entry: -abs(entry[2] - entry[1]))[:_CHANGED]:
        console.print(f"  {episode}: reward {before:+.3f} -> {after:+.3f}")
    if (more := len(result.changed) - _CHANGED) > 0:
        console.print(f"  … and {more} more, whose rewards changed less")
    for kind, number in result.failures.most_common():
        console.print(f"  {kind}: {number}, such as {result.examples[kind]}")
    console.print(f"To show it: engine show {folder} --score {result.label}")
