"""`engine serve`: over HTTP, groups of episodes for trainers, or episodes for programs that run elsewhere."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from engine.cli.exits import ERROR, FAILED, errors_exit, wrong_usage
from engine.cli.options import Limit, Out, Overrides, Quiet, Resume, SpecPath
from engine.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from engine.plugins.serve.serving import ServedRun
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore

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
    quiet: Quiet = False,
) -> None:
    """Run episodes for programs in other processes.

    Without --api: `POST /groups` runs groups of episodes for a trainer, and sends their training rows (docs/rows.md).
    The token is that of EPISODE_ENGINE_TOKEN or --token-file; without both, one is made and written to the file `token`
    of the run's folder.

    With --api, programs that run elsewhere open episodes, talk to the model, post rewards, and end them:
    `POST /episodes` with the token of EPISODE_ENGINE_TOKEN (without it, one is made and printed) opens an episode and
    returns its key, base_url and task. Finished episodes are stored as by `engine run`. Ctrl-C ends the service;
    `--resume` goes on.

    Exit status: 130 after Ctrl-C; 143 after SIGTERM; 1 when the spec is invalid or an episode could not be finished; 2
    when the command line is wrong or the port is in use; 3 when no server can be reached.
    """
    from engine.api.launch import Launch
    from engine.api.progress import ConsoleProgress
    from engine.console import make_console
    from engine.plugins.serve.serving import TOKEN, ServedRun

    if api and (trainer, token_file, ahead) != (None, None, None):
        wrong_usage("--trainer, --token-file and --ahead are for groups; leave out --api")
    token = os.environ.get(TOKEN, "") if token_file is None else _read_token(token_file)
    if not token and host not in LOOPBACK:
        wrong_usage(f"--host {host} is reachable from other machines: set {TOKEN} to a secret token")
    console = make_console()
    with errors_exit(ERROR):
        if (spec is None) == (resume is None) or (resume is not None and limit is not None):
            wrong_usage("give a spec to serve; or --resume RUN, which has its own spec and tasks")
        progress = ConsoleProgress(console)
        launch = Launch.of(spec, overrides or (), limit=limit, out=out, resume=resume, progress=progress)
        loaded, tasks, store = launch.loaded, launch.tasks, launch.store
        _refuse(loaded, store, trainer, api=api, resumed=resume is not None)
    again = f"engine serve {'--api ' if api else ''}--resume {store.folder}"

    open_run = partial(
        ServedRun,
        loaded,
        tasks,
        store,
        host=host,
        port=port,
        token=token,
        api=api,
        max_requests=max_requests,
        ahead=ahead,
        again=again,
        quiet=quiet,
    )
    _serve(open_run, store, console, f"--host {host} --port {port}", again)


def _refuse(loaded: LoadedSpec, store: RunStore, trainer: str | None, *, api: bool, resumed: bool) -> None:
    """Refuse what cannot be served, and close the store then. Raises: EngineError."""
    from engine.errors import EngineError
    from engine.plugins.agents.spec import AgentSpec
    from engine.plugins.serve.groups import refuse_unserved
    from engine.runner.processes import processes_of, refuse_many

    try:
        if api:
            refuse_many(loaded, "`engine serve --api`")
        if (processes := processes_of(loaded, store.folder)) is not None:
            processes.refuse_serving(store)
        if not api:
            refuse_unserved(loaded, trainer)
    except EngineError:
        if resumed or not store.discard():
            store.close()
        raise
    if api and AgentSpec.section_of(loaded.spec) is None:
        store.discard()
        wrong_usage("the spec has no `agent`: write `agent: {}` and `machine: agent`")


def _serve(open_run: Callable[[], ServedRun], store: RunStore, console: Console, place: str, again: str) -> NoReturn:
    """Serve until a signal, and exit."""
    import asyncio

    from engine.cli.exits import interrupted
    from engine.errors import EngineError

    async def served() -> list[str]:
        return await open_run().run(console)

    try:
        faults = asyncio.run(served())
    except EngineError as error:
        echo(str(error), err=True)
        if not store.discard():
            console.print(f"To continue: {again}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    except OSError as error:
        store.discard()
        wrong_usage(f"{place}: {error.strerror}; --port 0 takes a free one")
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
