"""`engine replay`: the same bytes again, without a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.terminal import echo

if TYPE_CHECKING:
    from engine.runner.replay import Replayed


def replay(
    run: Annotated[str, typer.Argument(help="The run: a folder, an id or its beginning, or `latest`.")],
    episode: Annotated[str | None, typer.Argument(help="One episode; all finished ones when left out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that runs are stored under.")] = Path("runs"),
    from_turn: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Fork: keep what came before turn K, and go on anew from there."),
    ] = None,
    salt: Annotated[
        int, typer.Option(min=0, help="With --from-turn: changes the sampling seeds; 0 samples with the run's own.")
    ] = 1,
) -> None:
    """Rebuild finished episodes from their journals, and compare them with what is stored, byte for byte.

    Exits with 0 when every episode is the same, 1 when one differs: the spec, the tokenizer or the engine has changed.

    With --from-turn K a new run is made instead: each episode begins with what the old one's journal says up to turn K,
    and goes on against the backend. An episode that never came to turn K is taken over as it is.
    """
    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.logs import configure_logging

    configure_logging()
    console = make_console()
    if from_turn is not None:
        if episode is not None:
            raise typer.BadParameter("--from-turn forks a whole run; leave out EPISODE")
        from engine.cli.run import fork_run

        fork_run(run, out, from_turn, salt)
        return
    try:
        results = asyncio.run(_replay(run, episode, out))
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
    if differing:
        raise typer.Exit(1)


async def _replay(run: str, episode: str | None, out: Path) -> list[Replayed]:
    from engine.runner.replay import Replayer
    from engine.store import RunStore, find_run
    from engine.tokens.loading import load_format

    store = RunStore.open(find_run(run, out=out), readonly=True)
    loaded = store.header.loaded_spec()
    replayer = Replayer(loaded, load_format(loaded.spec.model, loaded.base), store)
    try:
        stored = [store.trajectory(episode)] if episode is not None else store.trajectories()
        return [await replayer.check(trajectory, store.task(trajectory.task_id)) for trajectory in stored]
    finally:
        replayer.close()
        store.close()
