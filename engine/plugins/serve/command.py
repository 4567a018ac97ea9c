"""`engine serve`: over HTTP, groups of episodes for trainers, or episodes for programs that run elsewhere."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, wrong_usage
from engine.cli.options import Limit, Out, Overrides, Resume, SpecPath
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store.store import RunStore

TOKEN = "EPISODE_ENGINE_TOKEN"
"""The variable with the bearer token of the service."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    spec: SpecPath = None,
    api: Annotated[
        bool, typer.Option("--api", help="Episodes for programs that run elsewhere and speak to a model API.")
    ] = False,
    trainer: Annotated[
        str | None, typer.Option(help="Refuse the spec if this trainer, such as verl, cannot carry what it uses.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token, which only its owner may read (mode 0600).")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests for groups that are answered at the same time; more get status 429.")
    ] = 8,
    ahead: Annotated[
        int | None, typer.Option(min=1, help="Groups of a request that run or wait to be read, at most.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one, which is printed.")] = 0,
    overrides: Overrides = None,
    limit: Limit = None,
    out: Out = None,
    resume: Resume = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Run episodes for programs in other processes.

    Without --api: `POST /groups` runs groups of episodes for a trainer, and sends their training rows (docs/serve.md). The token is that of
    EPISODE_ENGINE_TOKEN or --token-file; without both, one is made and written to the file `token` of the run's folder.

    With --api, programs that run elsewhere open episodes, talk to the model, post rewards, and end them: `POST /episodes` with the token of EPISODE_ENGINE_TOKEN (without it, one is made and printed) opens an episode and returns its
    key, base_url and task. Finished episodes are stored as by `engine run`. Ctrl-C ends the service; `--resume` goes on.

    Exit status: 130 after Ctrl-C; 143 after SIGTERM; 1 when the spec is invalid or an episode could not be finished; 2 when the command line is
    wrong or the port is in use; 3 when no server can be reached.
    """
    import asyncio

    from engine.cli.commands.run import prepare
    from engine.cli.console import make_console
    from engine.cli.stopping import interrupted
    from engine.errors import EngineError
    from engine.logs import configure_logging
    from engine.plugins.agents.spec import AgentSpec
    from engine.plugins.serve.groups import refuse_unserved
    from engine.runner.processes import processes_of, refuse_many

    if api and (trainer, token_file, ahead) != (None, None, None):
        wrong_usage("--trainer, --token-file and --ahead are for groups; leave out --api")
    token = os.environ.get(TOKEN, "") if token_file is None else _read_token(token_file)
    if not token and host not in LOOPBACK:
        wrong_usage(f"--host {host} is reachable from other machines: set {TOKEN} to a secret token")
    configure_logging()
    console = make_console()
    opened: RunStore | None = None
    try:
        loaded, tasks, store = prepare(console, spec, list(overrides or ()), limit, out, resume)
        opened = store
        if api:
            refuse_many(loaded, "`engine serve --api`")
        if (processes := processes_of(loaded, store.folder)) is not None:
            processes.refuse_serving(store)
        if not api:
            refuse_unserved(loaded, trainer)
        elif AgentSpec.section_of(loaded.spec) is None:
            store.discard()
            wrong_usage("the spec has no `agent`: write `agent: {}` and `machine: agent`")
    except EngineError as error:
        echo(str(error), err=True)
        if opened is not None and (resume is not None or not opened.discard()):
            opened.close()
        raise typer.Exit(ERROR) from None
    again = f"engine serve {'--api ' if api else ''}--resume {store.folder}"
    try:
        groups = None if api else (max_requests, ahead)
        faults = asyncio.run(_serve(loaded, tasks, store, console, host, port, token, groups, again, quiet=quiet))
    except EngineError as error:
        echo(str(error), err=True)
        if not store.discard():
            console.print(f"To continue: {again}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    except OSError as error:
        store.discard()
        wrong_usage(f"--host {host} --port {port}: {error.strerror}; --port 0 takes a free one")
    finally:
        store.close()
    for fault in faults:
        console.print(f"could not be finished: {fault}", style="red")
    console.print(f"Run: {store.folder}\nTo continue: {again}")
    raise typer.Exit(interrupted())


def _read_token(path: Path) -> str:
    """The token in a file that only its owner may read."""
    try:
        if path.stat().st_mode & 0o077:
            wrong_usage(f"--token-file {path} can be read by others: chmod 600 {path}")
        token = path.read_text().strip()
    except OSError as error:
        wrong_usage(f"--token-file {path}: {error.strerror}")
    if not token:
        wrong_usage(f"--token-file {path} is empty")
    return token


async def _serve(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    console: Console,
    host: str,
    port: int,
    token: str,
    groups: tuple[int, int | None] | None,
    again: str,
    *,
    quiet: bool,
) -> list[str]:
    """Serve until a signal; the episodes that the engine could not finish."""
    import asyncio
    from contextlib import nullcontext

    from engine.backends.registry import open_backend
    from engine.cli.reports.progress import ticking
    from engine.cli.reports.report import Panel, print_summary
    from engine.cli.stopping import stop_on_signals
    from engine.plugins.agents.served import ServedPrograms
    from engine.plugins.agents.server import server_of_loop
    from engine.plugins.agents.spec import AgentSpec
    from engine.plugins.serve.episodes import ServedEpisodes
    from engine.plugins.serve.groups import GroupService
    from engine.runner.observers import RunObservers
    from engine.runner.overlong import fitting_tasks
    from engine.runner.processes import processes_of
    from engine.runner.runner import EpisodeRunner, Runner
    from engine.store.elsewhere import open_elsewhere
    from engine.store.private import private_file
    from engine.tokens.loading import load_format

    template = load_format(loaded.spec.model, loaded.base)
    tasks = fitting_tasks(tasks, loaded, template)
    backend = open_backend(loaded, template)
    backend.logs = store.folder / "servers"
    stop = asyncio.Event()
    broken: list[BaseException] = []

    def halt(error: BaseException) -> None:
        broken.append(error)
        stop.set()

    lost = [episode for episode, status in store.statuses().items() if status == "running"]
    programs = ServedPrograms() if groups is None else None
    served = () if programs is None else (programs,)
    observers = RunObservers(loaded, store)
    with stop_on_signals(stop, f"To continue: {again}"):
        async with observers.of_errors():
            try:
                await backend.start()
                training = groups is not None
                runner: EpisodeRunner
                if (processes := processes_of(loaded)) is not None:
                    runner = processes.episodes(store, None, keep_going=True)
                else:
                    runner = Runner(
                        loaded, tasks, template, backend, store, keep_going=True, training=training, given=served
                    )
                reader = open_elsewhere(store.folder) or store
                async with runner.serving():
                    if programs is not None:
                        await store.plan(tasks, loaded.spec.rollout.samples_per_task)
                    for trajectory in reader.trajectories():
                        runner.summary.add(trajectory)
                        runner.counters.before += 1
                    given = token or secrets.token_urlsafe(24)
                    episodes: ServedEpisodes | GroupService
                    if groups is not None:
                        most, ahead = groups
                        episodes = GroupService(
                            loaded,
                            tasks,
                            template,
                            backend,
                            store,
                            runner,
                            given,
                            halt,
                            max_requests=most,
                            ahead=ahead,
                            reader=reader,
                        )
                    else:
                        assert programs is not None
                        assert isinstance(runner, Runner)
                        episodes = ServedEpisodes(runner, programs, tasks, store, given, halt)
                    server = server_of_loop()
                    address = await server.listen(host, port, episodes.service)
                    try:
                        if lost and programs is not None:
                            shown = ", ".join(lost[:10]) + (", …" if len(lost) > 10 else "")
                            echo(f"Open when the run stopped, so they begin again when they are opened: {shown}")
                        agent = AgentSpec.section_of(loaded.spec)
                        if programs is not None and agent is not None and (agent.run or agent.use):
                            echo("The spec's own program is not started: programs run elsewhere.")
                        echo(f"Run: {store.folder}")
                        if not token and groups is not None:
                            private_file(store.folder / "token").write_text(given)
                            echo(f"Token: in {store.folder / 'token'}")
                        elif not token:
                            echo(f"Token (set {TOKEN} for one of your own): {given}")
                        echo(f"Serving {loaded.spec.name} at {address}; Ctrl-C ends it.")
                        panel = Panel(runner.counters, runner.summary)
                        with (
                            observers.watch(runner.counters, runner.summary, lambda: episodes.busy),
                            nullcontext() if quiet else ticking(panel.line, echo),
                        ):
                            await stop.wait()
                        if isinstance(episodes, ServedEpisodes) and episodes.open_ids:
                            shown = ", ".join(episodes.open_ids[:10]) + (", …" if len(episodes.open_ids) > 10 else "")
                            echo(f"Open, so they begin again when they are opened: {shown}")
                    finally:
                        await episodes.close()
                        await server.stop_listening()
            finally:
                await backend.close()
            if broken:
                raise broken[0]
    print_summary(console, runner.summary, seconds=runner.counters.seconds, tokens=runner.counters.tokens)
    return runner.faults
