"""`engine serve`: episodes over HTTP, for programs that run elsewhere."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, wrong_usage
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.spec.load import LoadedSpec
    from engine.spec.mix import TaskList
    from engine.store.store import RunStore

TOKEN = "EPISODE_ENGINE_TOKEN"
"""The variable with the bearer token of the service."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    spec: Annotated[
        Path | None, typer.Argument(help="The episode spec. With --resume the run's own spec is used.")
    ] = None,
    api: Annotated[
        bool, typer.Option("--api", help="Episodes for programs that run elsewhere and speak to a model API.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one, which is printed.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set rollout.seed=1")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Serve only this number of tasks, the first ones.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder in which runs are stored; by default the spec's `rollout.out`.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Continue this run: a folder, an id or its beginning, or `latest`."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Let programs that run elsewhere open episodes, talk to the model, post rewards, and end them.

    `POST /episodes` with the token of EPISODE_ENGINE_TOKEN (without it, one is made and printed) opens an episode and returns its
    key, base_url and task. Finished episodes are stored as by `engine run`. Ctrl-C ends the service; `--resume` goes on.

    Exit status: 130 after Ctrl-C; 143 after SIGTERM; 1 when the spec is invalid or an episode could not be finished; 2 when the command line is
    wrong or the port is in use; 3 when no server can be reached.
    """
    from engine.cli.console import make_console
    from engine.cli.run import prepare
    from engine.cli.run_drivers import refuse_many
    from engine.cli.stopping import interrupted
    from engine.errors import EngineError
    from engine.logs import configure_logging

    if not api:
        wrong_usage("write --api: episodes for programs that speak to a model API")
    token = os.environ.get(TOKEN, "")
    if not token and host not in LOOPBACK:
        wrong_usage(f"--host {host} is reachable from other machines: set {TOKEN} to a secret token")
    configure_logging()
    console = make_console()
    try:
        loaded, tasks, store = prepare(console, spec, list(overrides or ()), limit, out, resume)
        try:
            refuse_many(loaded, "serve")
        except EngineError:
            store.discard()
            raise
        if loaded.spec.agent is None:
            store.discard()
            wrong_usage("the spec has no `agent`: write `agent: {}` and `machine: agent`")
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(ERROR) from None
    try:
        faults = asyncio.run(_serve(loaded, tasks, store, console, host, port, token, quiet=quiet))
    except EngineError as error:
        echo(str(error), err=True)
        if not store.discard():
            console.print(f"To continue: engine serve --api --resume {store.folder}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    except OSError as error:
        store.discard()
        wrong_usage(f"--host {host} --port {port}: {error.strerror}; --port 0 takes a free one")
    finally:
        store.close()
    for fault in faults:
        console.print(f"could not be finished: {fault}", style="red")
    console.print(f"Run: {store.folder}\nTo continue: engine serve --api --resume {store.folder}")
    raise typer.Exit(interrupted())


async def _serve(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    console: Console,
    host: str,
    port: int,
    token: str,
    *,
    quiet: bool,
) -> list[str]:
    """Serve until a signal; the episodes that the engine could not finish."""
    from contextlib import nullcontext

    from engine.agents.served import ServedPrograms
    from engine.agents.server import server_of_loop
    from engine.backends.registry import open_backend
    from engine.cli.progress import ticking
    from engine.cli.report import Panel, print_summary
    from engine.cli.stopping import stop_on_signals
    from engine.runner.noticed import RunNotices
    from engine.runner.overlong import fitting_tasks
    from engine.runner.run import Runner
    from engine.serve.episodes import EpisodeService
    from engine.tokens.loading import load_format

    form = load_format(loaded.spec.model, loaded.base)
    tasks = fitting_tasks(tasks, loaded, form)
    backend = open_backend(loaded, form)
    backend.logs = store.folder / "servers"
    stop = asyncio.Event()
    broken: list[BaseException] = []

    def halt(error: BaseException) -> None:
        broken.append(error)
        stop.set()

    lost = [episode for episode, status in store.statuses().items() if status == "running"]
    programs, notices = ServedPrograms(), RunNotices(loaded, store)
    with stop_on_signals(stop, f"To continue: engine serve --api --resume {store.folder}"):
        async with notices.of_errors():
            try:
                await backend.start()
                runner = Runner(loaded, tasks, form, backend, store, keep_going=True, programs=programs)
                async with runner.serving():
                    await store.plan(tasks, loaded.spec.rollout.samples_per_task)
                    for trajectory in store.trajectories():
                        runner.summary.add(trajectory)
                        runner.live.before += 1
                    given = token or secrets.token_urlsafe(24)
                    episodes = EpisodeService(runner, programs, tasks, store, given, halt)
                    server = server_of_loop()
                    address = await server.listen(host, port, episodes.service)
                    try:
                        if lost:
                            shown = ", ".join(lost[:10]) + (", …" if len(lost) > 10 else "")
                            echo(f"Open when the run stopped, so they begin again when they are opened: {shown}")
                        if (agent := loaded.spec.agent) is not None and (agent.run or agent.use):
                            echo("The spec's own program is not started: programs run elsewhere.")
                        echo(f"Run: {store.folder}")
                        if not token:
                            echo(f"Token (set {TOKEN} for one of your own): {given}")
                        echo(f"Serving {loaded.spec.name} at {address}; Ctrl-C ends it.")
                        panel = Panel(runner.live, runner.summary)
                        with (
                            notices.watch(runner.live, runner.summary),
                            nullcontext() if quiet else ticking(panel.line, echo),
                        ):
                            await stop.wait()
                        if episodes.open_ids:
                            shown = ", ".join(episodes.open_ids[:10]) + (", …" if len(episodes.open_ids) > 10 else "")
                            echo(f"Open, so they begin again when they are opened: {shown}")
                    finally:
                        await episodes.close()
                        await server.stop_listening()
            finally:
                await backend.close()
            if broken:
                raise broken[0]
    print_summary(console, runner.summary, seconds=runner.live.seconds, tokens=runner.live.tokens)
    return episodes.faults
