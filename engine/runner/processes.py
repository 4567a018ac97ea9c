"""The episodes of a spec in several processes, which a plugin drives instead of one `Runner` (the hook `drive`).

Invariant: a spec that asks for several processes is driven by them or refused; it never runs in one process in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from engine.errors import SpecError
from engine.plugin import Hook
from engine.schemas.sections import written
from engine.spec.text.diagnostic import Diagnostic
from engine.store.find import is_divided

if TYPE_CHECKING:
    from pathlib import Path

    from engine.api.progress import Progress
    from engine.backends.backend import ServerWeights
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunResult, RunSummary
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.spec.text.diagnostic import DataPath
    from engine.store.store import RunStore


class EpisodeRunner(Protocol):
    """Runs single episodes: a `Runner`, or what gives them to runners in other processes."""

    counters: RunCounters
    summary: RunSummary
    faults: list[str]
    """Episodes that could not be finished because of an error in the engine, and why."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Start what episodes need, and close it when the block ends."""

    async def episode(self, task: Task, sample: int, attempt: int = 0) -> Trajectory | None:
        """See `Runner.episode`."""

    def count(self, trajectory: Trajectory) -> None:
        """See `Runner.count`."""


class Processes(Protocol):
    """The processes that run the episodes of one spec."""

    rule: str
    """Id of the rule by which something is refused that runs in one process."""
    path: DataPath
    """The key of the spec that asks for them."""
    optional: bool
    """Whether one process does where several are not supported: the spec asks for no certain number."""

    @property
    def alone(self) -> LoadedSpec:
        """The spec for a part of the work that one process does, such as a training's evaluations."""

    def refuse_resume(self, store: RunStore, *, retry: bool) -> None:
        """Raise SpecError or StoreError if they cannot continue a run. `retry`: failed episodes are to run again."""

    def refuse_training(self) -> None:
        """Raise SpecError if a training cannot use them."""

    def refuse_serving(self, store: RunStore) -> None:
        """Raise SpecError or StoreError if a service cannot use them."""

    async def run(
        self,
        tasks: TaskList,
        store: RunStore,
        progress: Progress,
        *,
        keep_going: bool,
        stop: asyncio.Event,
    ) -> RunResult:
        """Run all episodes that are not done; `progress` is an `engine.api.progress.Progress`.

        Args:
            tasks: All tasks of the run.
            store: Its store, open for writing.
            progress: Shows how it goes on.
            keep_going: See `Runner`.
            stop: Setting it ends the run early and cleanly.
        """

    def episodes(self, store: RunStore, weights: ServerWeights | None, *, keep_going: bool) -> EpisodeRunner:
        """What runs single episodes of a training or a service.

        Args:
            store: The run's store, open for writing.
            weights: What a trainer has given the servers; None: the versions are not known here.
            keep_going: See `Runner`.
        """

    async def follow(self, weights: ServerWeights) -> None:
        """Tell the processes of `episodes` what the servers have."""


DRIVE: Hook[Callable[[LoadedSpec, Path | None], Processes | None]] = Hook("drive")
"""The processes of a spec, or of the run in a folder that such processes have begun; None: one process runs it."""


def processes_of(loaded: LoadedSpec, folder: Path | None = None) -> Processes | None:
    """The processes that run the episodes of a spec; None: this one.

    Args:
        loaded: The spec.
        folder: The folder of a run that goes on: processes that have begun it continue it, whatever the spec says now.
    """
    asked = None if folder is not None and is_divided(folder) else written(loaded.spec)
    return next(iter(DRIVE.made(asked, loaded, folder)), None)


def refuse_many(loaded: LoadedSpec, who: str) -> None:
    """Refuse a spec with several processes for something that drives its episodes in one.

    Args:
        loaded: The spec.
        who: What does so, as a message names it.

    Raises:
        SpecError: the spec asks for several processes.
    """
    processes = processes_of(loaded)
    if processes is None or processes.optional:
        return
    message = (
        f"{who} does not support several drivers; `engine run`, `engine eval`, `engine train` and `engine serve SPEC` "
        "do"
    )
    fix = f"give --set {'.'.join(map(str, processes.path))}=1, or set it in the spec"
    raise SpecError([Diagnostic(processes.rule, "error", message, fix, loaded.origin(processes.path), processes.path)])
