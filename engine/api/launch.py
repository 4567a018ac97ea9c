"""A spec -> a run that is stored. `engine run` is built on this.

    run = engine.run("guess.yaml", {"rollout.seed": 1}, limit=4)      # blocks, in a notebook too
    run = await engine.run_async(spec)                                # in an event loop of one's own
    async for event in engine.play(spec, task=3): ...                 # one episode, step by step

Invariant: what ends a launch, be it an error or an interrupt, leaves its run closed, and what was done stored.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
import structlog

from engine.api.progress import Progress, RunPanel, progress_of
from engine.api.runs import Run
from engine.api.specs import Overrides, load, texts_of
from engine.backends.registry import open_backend
from engine.errors import EngineError, StoreError
from engine.logs import configure_logging
from engine.masking import mask_credentials
from engine.runner.observers import RunObservers
from engine.runner.processes import processes_of
from engine.runner.runner import Runner
from engine.runner.source import fitting_tasks
from engine.spec.load import LoadedSpec, override_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, find_run
from engine.store.header import changes_of, resumable_keys
from engine.store.journal import Journal
from engine.store.private import private_file
from engine.tokens.loading import load_format
from engine.validate import refuse_errors, refuse_first_tasks

if TYPE_CHECKING:
    from engine.runner.summary import RunResult
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Blame, Trajectory
    from engine.spec.rows.mix import TaskList
    from engine.store.codec import EncodedRecord
    from engine.store.writer import Write

P = ParamSpec("P")
T = TypeVar("T")
Retry = Literal["backend", "environment", "tool", "user", "all"]
"""Failures whose episodes are run again, by blame; `all`: every blame but `policy`, whose failures are results."""
_ALL: tuple[Blame, ...] = ("backend", "environment", "tool", "user", "spec", "engine")


class Launch:
    """A run that is about to begin or to go on: its checked spec, its tasks, and its store, which is open for writing.

    Args:
        loaded: The spec.
        tasks: All its tasks.
        store: The run's store. `run` closes it.
        again: Episodes that failed with one of these blames are run again.
    """

    def __init__(self, loaded: LoadedSpec, tasks: TaskList, store: RunStore, again: Sequence[Blame] = ()) -> None:
        self.loaded = loaded
        self.tasks = tasks
        self.store = store
        self._again = again

    @classmethod
    def of(
        cls,
        spec: str | Path | LoadedSpec | None = None,
        overrides: Overrides = (),
        *,
        limit: int | None = None,
        out: str | Path | None = None,
        resume: str | Path | None = None,
        retry_failed: Retry | None = None,
        evaluation: bool = False,
        progress: Progress | bool = True,
    ) -> Launch:
        """Check a spec, and create its run; or open a run to continue it.

        Args:
            spec: A file, or a spec that is loaded. None with `resume`: the run has its own.
            overrides: See `load`. With `resume`: values that a resumed run may change.
            limit: Run only this number of tasks, the first ones.
            out: Folder in which runs are stored; by default the spec's `rollout.out`, and `runs` with `resume`.
            resume: The run to continue: a folder, an id, the beginning of one, or `latest`.
            retry_failed: With `resume`: the failures whose episodes are run again.
            evaluation: No row of the run is trainable.
            progress: What warnings are given to; see `Progress`.

        Raises:
            SpecError: the spec has errors.
            StoreError: the run cannot be opened or created.
            ValueError: neither a spec nor a run is given, or both are.
        """
        if (spec is None) == (resume is None) or (retry_failed is not None if resume is None else limit is not None):
            raise ValueError("give a spec, or a run to resume; `limit` is for a spec, `retry_failed` for a run")
        shown = progress_of(progress)
        changes = texts_of(overrides)
        if resume is not None:
            return cls._resumed(resume, changes, Path(out or "runs"), retry_failed, shown)
        assert spec is not None
        if limit is not None:
            changes.append(f"tasks.limit={limit}")
        loaded = load(spec, changes)
        for item in refuse_errors(loaded):
            shown.warn(str(item))
        tasks = load_tasks(loaded)
        refuse_first_tasks(loaded, tasks)
        header = RunHeader.of(loaded, overrides=changes, evaluation=evaluation)
        return cls(loaded, tasks, RunStore.create(Path(out or loaded.spec.rollout.out), header))

    @classmethod
    def _resumed(
        cls, run: str | Path, changes: list[str], out: Path, retry_failed: Retry | None, progress: Progress
    ) -> Launch:
        store = RunStore.open(find_run(run, out=out))
        try:
            loaded = store.header.loaded_spec(strict=True)
            if changes:
                new = override_spec(loaded, changes)
                _, refused = changes_of(loaded.spec, new.spec, resumable_keys())
                if refused:
                    names = ", ".join(f"`{path}`" for path in refused[:8])
                    keys = ", ".join(f"`{key}`" for key in resumable_keys() if not key.endswith(".*")) or "nothing"
                    raise StoreError(f"a resumed run cannot change {names}; what may change: {keys}")
                for item in refuse_errors(new):
                    progress.warn(str(item))
                loaded = new
            tasks = load_tasks(loaded)
        except BaseException:
            store.close()
            raise
        return cls(loaded, tasks, store, [blame for blame in _ALL if retry_failed in ("all", blame)])

    def refuse_processes(self) -> None:
        """Refuse to continue a run in one process that several began, or the other way round. Raises: EngineError."""
        if (processes := processes_of(self.loaded, self.store.folder)) is not None:
            processes.refuse_resume(self.store, retry=bool(self._again))

    async def run(
        self, *, progress: Progress | bool = True, keep_going: bool = False, stop: asyncio.Event | None = None
    ) -> Run:
        """Run all episodes that are not done, and close the store. A cancellation stops as `stop` does.

        Args:
            progress: What shows how the run goes on; see `Progress`.
            keep_going: Do not stop if the first 16 episodes all fail with one cause.
            stop: Setting it ends the run early and cleanly.

        Raises:
            EngineError: the run cannot begin, or a record cannot be stored. If no episode was planned, its folder is
                removed.
        """
        stop = stop or asyncio.Event()
        try:
            result = await finished(self._drive(progress_of(progress), keep_going=keep_going, stop=stop), stop)
        except EngineError:
            self.store.discard()
            raise
        finally:
            self.store.close()
        return Run(RunStore.open(self.store.folder, readonly=True), result)

    async def _drive(self, progress: Progress, *, keep_going: bool, stop: asyncio.Event) -> RunResult:
        loaded, store = self.loaded, self.store
        if not structlog.is_configured():
            configure_logging()
        if (processes := processes_of(loaded, store.folder)) is not None:
            return await processes.run(self.tasks, store, progress, keep_going=keep_going, stop=stop)
        began = time.perf_counter()
        chat_format = load_format(loaded.spec.model, loaded.base)
        tasks = fitting_tasks(self.tasks, loaded, chat_format)
        backend = open_backend(loaded, chat_format)
        backend.logs = store.folder / "servers"
        observers = RunObservers(loaded, store)
        async with observers.of_errors():
            try:
                if loaded.spec.backend.loads_model:
                    progress.say(f"loading {loaded.spec.model.path} …")
                await backend.start()
                progress.say(
                    f"{loaded.spec.name}: {len(tasks)} tasks × {loaded.spec.rollout.samples_per_task} samples on "
                    f"{loaded.spec.backend.kind}, ready after {time.perf_counter() - began:.1f} s"
                )
                runner = Runner(loaded, tasks, chat_format, backend, store, keep_going=keep_going)
                if self._again:
                    progress.say(f"{len(await store.begin_again(self._again))} failed episodes are run again")
                began = time.perf_counter()
                watching = progress.watching(RunPanel(runner.counters, runner.summary))
                with observers.watch(runner.counters, runner.summary), watching:
                    result = await runner.run(stop=stop)
            finally:
                await backend.close()
        await observers.of_result(result)
        stats = backend.stats() | ({"played": runner.service_stats} if runner.service_stats else {})
        write_counts(store.folder, stats, progress)
        result.seconds, result.tokens = time.perf_counter() - began, runner.counters.tokens
        if cost := runner.cost:
            most = "" if cost.most is None else f" of at most {cost.most:.6g}"
            words = f"Cost of the run: {cost.spent:.6g}{most}, with users, judges and unfinished episodes"
            result.notes.append(words)
        result.notes += [*([runner.busy_calls] if runner.busy_calls else []), *_checks(stats)]
        return result


def write_counts(folder: Path, counts: dict[str, Any], progress: Progress) -> None:
    """Write the counts of a run's backend beside its store."""
    try:
        report = private_file(folder / "backend.json")
        report.write_text(mask_credentials(json.dumps(counts, indent=2, default=str)) + "\n")
    except OSError as error:
        progress.warn(f"the backend's counts could not be written: {error}")


def _checks(stats: dict[str, Any]) -> list[str]:
    """What a backend compared with its servers, in words."""
    lines = []
    if certificate := stats.get("certificate"):
        lines.append(
            f"Certificate: {certificate['turns_checked']} prompts compared with the prompt that the server used, "
            f"{certificate['prompt_mismatches']} differ, {certificate['turns_unchecked']} could not be compared"
        )
    if images := stats.get("images"):
        lines.append(
            f"Images: sent at the size of their grid, so that the servers ({', '.join(images['server_processors'])}) "
            "see the rows' own pixels"
        )
    if verified := stats.get("verified"):
        lines.append(
            "Verified: the servers' log-probs of a prompt differ from those of the model's files by "
            f"{verified['largest']:.2g} at most and {verified['mean']:.2g} on average, over {verified['tokens']} tokens"
        )
    return lines


async def run_async(
    spec: str | Path | LoadedSpec | None = None,
    overrides: Overrides = (),
    *,
    limit: int | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    retry_failed: Retry | None = None,
    keep_going: bool = False,
    evaluation: bool = False,
    progress: Progress | bool = True,
) -> Run:
    """Run the episodes of a spec, and store them. The form of `run` for an event loop of one's own.

    Args:
        spec: A file, or a spec that is loaded. None with `resume`: the run has its own.
        overrides: See `load`.
        limit: Run only this number of tasks, the first ones.
        out: Folder in which runs are stored; by default the spec's `rollout.out`.
        resume: The run to continue: a folder, an id, the beginning of one, or `latest`.
        retry_failed: With `resume`: the failures whose episodes are run again.
        keep_going: Do not stop if the first 16 episodes all fail with one cause.
        evaluation: No row of the run is trainable.
        progress: False shows nothing; or a `Progress` of one's own.

    Raises:
        EngineError: the spec has errors, or the run cannot begin or go on.
    """
    shown = progress_of(progress)
    launch = Launch.of(
        spec,
        overrides,
        limit=limit,
        out=out,
        resume=resume,
        retry_failed=retry_failed,
        evaluation=evaluation,
        progress=shown,
    )
    if resume is not None:
        launch.refuse_processes()
    return await launch.run(progress=shown, keep_going=keep_going)


def blocking(work: Callable[P, Coroutine[Any, Any, T]], name: str, doc: str) -> Callable[P, T]:
    """The form of a coroutine function that waits for its end, with the same arguments."""

    @wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _waited(work(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


run = blocking(
    run_async,
    "run",
    """Run the episodes of a spec, and store them. The arguments and errors are those of `run_async`.

    Where an event loop runs, as in a notebook, the run has a thread of its own. Ctrl-C stops it cleanly, and is raised
    when what was done is stored; `resume` goes on.
    """,
)


async def finished(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    """Wait for a coroutine that `stop` ends cleanly. A cancellation sets `stop`, and is raised when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await task
        raise


def _waited(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine: here, or in a thread of its own if this thread runs an event loop. Ctrl-C cancels it, and
    is raised when it has ended."""
    running: asyncio.AbstractEventLoop | None = None
    with suppress(RuntimeError):
        running = asyncio.get_running_loop()
    if running is None:
        return asyncio.run(work)
    begun: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    with _raising_interrupts(), ThreadPoolExecutor(1, "engine") as pool:  # which waits for its thread
        ended = pool.submit(asyncio.run, cancellable())
        try:
            return ended.result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # its loop is closed: the work has ended
                begun.result()()
            raise


@contextmanager
def _raising_interrupts() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt: the handler of `asyncio.run` waits for the loop, which waits here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _journal_heard_by(heard: Callable[[JournalEntry], None]) -> type[Journal]:
    """The class of a journal whose entries are also given to who plays the episode."""

    class HeardJournal(Journal):
        __slots__ = ()

        def append(self, entry: JournalEntry, encoded: EncodedRecord) -> Write:
            heard(entry)
            return super().append(entry, encoded)

        def hold(self, entry: JournalEntry, encoded: EncodedRecord) -> None:
            heard(entry)
            super().hold(entry, encoded)

    return HeardJournal


async def play(
    spec: str | Path | LoadedSpec,
    overrides: Overrides = (),
    *,
    task: int | str = 0,
    out: str | Path | None = None,
    progress: Progress | bool = False,
) -> AsyncGenerator[JournalEntry | Trajectory, None]:
    """Run one episode, and yield each entry of its journal when it is written; last its trajectory.

    An entry has the state, the record of what was done there, the event, and the next state. The episode stops when
    the generator is closed (`contextlib.aclosing`).

    Args:
        spec: A file, or a spec that is loaded.
        overrides: See `load`.
        task: The task's number or id.
        out: Folder in which a run with this episode is stored; by default it is not kept.
        progress: See `Progress`.

    Raises:
        StoreError: the spec has no such task.
        EngineError: the spec has errors, or the episode cannot be run to its end.
    """
    with ExitStack() as stack:
        folder = out or stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        changes = [*texts_of(overrides), "rollout.samples_per_task=1"]
        events: asyncio.Queue[JournalEntry | None] = asyncio.Queue()
        launch = Launch.of(spec, changes, out=folder, progress=progress)
        launch.store.journal_class = _journal_heard_by(events.put_nowait)
        places = (at for at, row in enumerate(launch.tasks) if task in (at, row.id))
        if (place := next(places, None)) is None:
            launch.store.discard()
            raise StoreError(f"the spec has no task {task!r}; it has {len(launch.tasks)} tasks")
        launch.tasks = launch.tasks.chosen(np.asarray([place]))
        running = asyncio.ensure_future(launch.run(progress=progress, keep_going=True))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (entry := await events.get()) is not None:
                yield entry
            for trajectory in (await running).trajectories():
                yield trajectory
            if (result := running.result().result) is not None and (result.faults or result.stopped):
                raise result.stopped or EngineError(result.faults[0])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
