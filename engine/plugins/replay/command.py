"""`engine replay`: rebuilds episodes from their journals, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.options import RunsFolder, StoredRun
from engine.terminal import echo

if TYPE_CHECKING:
    from engine.runner.replay import Replayed


def replay(
    run: StoredRun,
    episode: Annotated[str | None, typer.Argument(help="One episode; by default all finished ones.")] = None,
    out: RunsFolder = Path("runs"),
    from_turn: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Fork: keep the entries before turn K, and sample again from there."),
    ] = None,
    salt: Annotated[
        int, typer.Option(min=0, help="With --from-turn: changes the sampling seeds; 0 uses the run's own.")
    ] = 1,
) -> None:
    """Rebuild finished episodes from their journals, and compare them with the stored ones, byte for byte.

    Runs code that the run names: formats of tool calls, actions, and environments whose tools stand in the prompt.

    Exits with 0 if every episode is the same, and 1 if one differs: the spec, the tokenizer or the engine has changed.

    With --from-turn K a new run is made instead: each episode begins with the old journal's entries before turn K
    and continues with the backend. An episode without a turn K is copied unchanged.
    """
    import asyncio

    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.logs import configure_logging

    configure_logging()
    console = make_console()
    if from_turn is not None:
        if episode is not None:
            raise typer.BadParameter("--from-turn forks a whole run; leave out EPISODE")
        _fork(run, out, from_turn, salt)
        return
    try:
        results, dropped = asyncio.run(_replay(run, episode, out))
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
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
        raise typer.Exit(1)


async def _replay(run: str, episode: str | None, out: Path) -> tuple[list[Replayed], str]:
    from engine.cli.run_report import dropped_words
    from engine.runner.replay import Replayer
    from engine.store import RunStore, find_run
    from engine.tokens.loading import load_format

    store = RunStore.open(find_run(run, out=out), readonly=True)
    store.header.need_plugins()
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
    from engine.cli.console import make_console
    from engine.cli.run import conclude
    from engine.errors import EngineError
    from engine.plugins.replay.fork import fork
    from engine.store import RunStore, find_run

    try:
        with RunStore.open(find_run(run, out=out), readonly=True) as source:
            loaded, tasks, store = fork(source, out, turn, salt)
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    conclude(loaded, tasks, store, make_console(), quiet=False)
