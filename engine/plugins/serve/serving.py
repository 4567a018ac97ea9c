"""One run that is served until a signal: its backend, its runner, its service, and what is printed meanwhile.

Invariant: whatever ends it, the service is closed before the runner, and the runner before the backend.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import nullcontext
from typing import TYPE_CHECKING

from engine.api.progress import RunPanel, ticking
from engine.backends.registry import open_backend
from engine.cli.exits import stop_on_signals
from engine.cli.run_report import print_summary
from engine.plugins.agents.program import ServedPrograms
from engine.plugins.agents.server import server_of_loop
from engine.plugins.agents.spec import AgentSpec
from engine.plugins.serve.episodes import ServedEpisodes
from engine.plugins.serve.groups import GroupService
from engine.runner.observers import RunObservers
from engine.runner.processes import processes_of
from engine.runner.runner import Runner
from engine.runner.source import fitting_tasks
from engine.store.find import open_elsewhere
from engine.store.private import private_file
from engine.terminal import echo
from engine.tokens.loading import load_format

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.processes import EpisodeRunner
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store.store import RunStore

_SHOWN = 10
"""Ids of episodes in a message."""
TOKEN = "EPISODE_ENGINE_TOKEN"
"""The variable with the bearer token of the service."""


class ServedRun:
    """A run and its service.

    Args:
        loaded: The spec.
        tasks: Its tasks.
        store: Its store, open for writing; the caller closes it.
        host: Address to listen on.
        port: Port; 0: a free one.
        token: The bearer token; empty: one is made.
        api: Whether episodes of programs that run elsewhere are served; otherwise groups.
        max_requests: Of groups: requests that are answered at the same time.
        ahead: Of groups: those of a request that run or wait to be read.
        again: The command that continues the run.
        quiet: Print no progress.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        tasks: TaskList,
        store: RunStore,
        *,
        host: str,
        port: int,
        token: str,
        api: bool,
        max_requests: int,
        ahead: int | None,
        again: str,
        quiet: bool,
    ) -> None:
        self._loaded, self._store, self._place, self._again, self._quiet = loaded, store, (host, port), again, quiet
        self._max_requests, self._ahead, self._is_given = max_requests, ahead, bool(token)
        self._template = load_format(loaded.spec.model, loaded.base)
        self._tasks = fitting_tasks(tasks, loaded, self._template)
        self._backend = open_backend(loaded, self._template)
        self._backend.logs = store.folder / "servers"
        self._programs = ServedPrograms() if api else None
        self._lost = [episode for episode, status in store.statuses().items() if status == "running"]
        self._token = token or secrets.token_urlsafe(24)
        self._observers = RunObservers(loaded, store)
        self._stop = asyncio.Event()
        self._broken: list[BaseException] = []

    async def run(self, console: Console) -> list[str]:
        """Serve until a signal. Returns the episodes that the engine could not finish.

        Raises:
            EngineError: the service cannot work, or had to stop.
            OSError: the address cannot be used.
        """
        with stop_on_signals(self._stop, f"To continue: {self._again}"):
            async with self._observers.of_errors():
                try:
                    await self._backend.start()
                    processes = None if self._programs is not None else processes_of(self._loaded)
                    runner: EpisodeRunner
                    if processes is not None:
                        runner = processes.episodes(self._store, None, keep_going=True)
                    else:
                        runner = Runner(
                            self._loaded,
                            self._tasks,
                            self._template,
                            self._backend,
                            self._store,
                            keep_going=True,
                            training=self._programs is None,
                            given=() if self._programs is None else (self._programs,),
                        )
                    async with runner.serving():
                        await self._serve(runner)
                finally:
                    await self._backend.close()
                if self._broken:
                    raise self._broken[0]
        print_summary(console, runner.summary, seconds=runner.counters.seconds, tokens=runner.counters.tokens)
        return runner.faults

    async def _serve(self, runner: EpisodeRunner) -> None:
        """Answer requests until `stop`."""
        reader = open_elsewhere(self._store.folder) or self._store
        if self._programs is not None:
            await self._store.plan(self._tasks, self._loaded.spec.rollout.samples_per_task)
        for trajectory in reader.trajectories():
            runner.summary.add(trajectory)
            runner.counters.before += 1
        service: ServedEpisodes | GroupService
        if self._programs is None:
            service = GroupService(
                self._loaded,
                self._tasks,
                self._template,
                self._backend,
                self._store,
                runner,
                self._token,
                self._halt,
                max_requests=self._max_requests,
                ahead=self._ahead,
                reader=reader,
            )
        else:
            assert isinstance(runner, Runner)  # `refuse_many` has refused several processes
            service = ServedEpisodes(runner, self._programs, self._tasks, self._store, self._token, self._halt)
        server = server_of_loop()
        address = await server.listen(*self._place, service.service.answer)
        try:
            self._announce(address)
            progress = nullcontext() if self._quiet else ticking(RunPanel(runner.counters, runner.summary).line, echo)
            with self._observers.watch(runner.counters, runner.summary, lambda: service.busy), progress:
                await self._stop.wait()
            if isinstance(service, ServedEpisodes) and service.open_ids:
                echo(f"Open, so they begin again when they are opened: {_shown(service.open_ids)}")
        finally:
            await service.close()
            await server.stop_listening()

    def _halt(self, error: BaseException) -> None:
        self._broken.append(error)
        self._stop.set()

    def _announce(self, address: str) -> None:
        """Print where the service is, and how it is reached."""
        agent, folder = AgentSpec.section_of(self._loaded.spec), self._store.folder
        if self._lost and self._programs is not None:
            echo(f"Open when the run stopped, so they begin again when they are opened: {_shown(self._lost)}")
        if self._programs is not None and agent is not None and not agent.elsewhere:
            echo("The spec's own program is not started: programs run elsewhere.")
        echo(f"Run: {folder}")
        if not self._is_given and self._programs is None:
            private_file(folder / "token").write_text(self._token)
            echo(f"Token: in {folder / 'token'}")
        elif not self._is_given:
            echo(f"Token (set {TOKEN} for one of your own): {self._token}")
        echo(f"Serving {self._loaded.spec.name} at {address}; Ctrl-C ends it.")


def _shown(episodes: list[str]) -> str:
    return ", ".join(episodes[:_SHOWN]) + (", …" if len(episodes) > _SHOWN else "")
