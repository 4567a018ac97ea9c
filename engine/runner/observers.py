"""What watches runs, their episodes and trainings from outside: the observers of plugins.

An observer never raises into the work that it watches once this has begun, and delays it by no more than a deadline of
its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.plugin import Hook
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.runner.batch import Batch
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunResult, RunSummary
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore


class RunObserver(Protocol):
    """Watches a run, an evaluation or a service."""

    def watch(self, live: RunCounters, summary: RunSummary, busy: Callable[[], bool]) -> AbstractContextManager[object]:
        """Watch the counters while episodes run; `busy` says whether one runs."""
        ...

    async def failed(self, error: Exception) -> None:
        """The run could not begin or go on."""
        ...

    async def ended(self, result: RunResult) -> None:
        """The run is over, and no signal stopped it."""
        ...


class EpisodeObserver(Protocol):
    """Watches the episodes that one `Runner` runs."""

    def episode_ended(self, trajectory: Trajectory) -> None:
        """An episode is stored."""
        ...

    def close(self) -> None:
        """No more episodes end. Called in a thread."""
        ...


class TrainingObserver:
    """Watches a training. A subclass defines what it needs."""

    def watch(self, step: Callable[[], int], tokens: Callable[[], int]) -> AbstractContextManager[object]:
        """Watch the counters of a training: the step, and the tokens that were sampled since the launch."""
        return nullcontext()

    def began(self) -> None:
        """The training has its model and its folder, with an opened `metrics.jsonl`. Raises: EngineError: it must not
        go on."""

    def continued(self, step: int) -> None:
        """The next step is the one after this; later lines of `metrics.jsonl` have been removed."""

    def opened(self, store: RunStore) -> None:
        """The store of the training's episodes is open for writing, until the training ends. Not called where it
        samples none."""

    def sampled(self, step: int, batch: Batch) -> tuple[Mapping[str, float], str | None]:
        """The batch of a step is collected. Returns further metrics of the step, and a warning that it and those before
        it lack a learning signal: after the update `lacks_signal` gets it."""
        return {}, None

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of `metrics.jsonl` is written; step 0 is the evaluation before the first step."""

    async def checkpointed(self, timed: Callable[[str], AbstractContextManager[None]]) -> Mapping[str, float]:
        """A checkpoint is written after a step. Returns further metrics of the step; `timed` shows a phase and counts
        its seconds."""
        return {}

    def progressed(self) -> None:
        """An episode or a step is finished."""

    async def lacks_signal(self, step: int, reason: str) -> None:
        """For several steps, no group had a learning signal."""

    async def failed(self, error: Exception, step: int) -> None:
        """It stopped by an error."""

    async def ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """It reached its last step, which has these metrics."""

    def close(self) -> str | None:
        """No more calls follow. Returns a line for the end of the command's output, if there is one to show."""
        return None


OBSERVE_RUN: Hook[Callable[[LoadedSpec, RunStore], RunObserver | None]] = Hook("observe_run")
"""Makes the observer of a run; None if the spec asks for none. It may raise EngineError: then the run does not
begin."""
OBSERVE_EPISODES: Hook[Callable[[LoadedSpec, RunStore], EpisodeObserver | None]] = Hook("observe_episodes")
"""The same for the episodes of a `Runner`, of which a run, a training or a driver has one."""
OBSERVE_TRAINING: Hook[Callable[[LoadedSpec, Path], TrainingObserver | None]] = Hook("observe_training")
"""The same for a training in a folder."""


class RunObservers:
    """The observers of one run. A run that a signal stops is not reported.

    observers = RunObservers(loaded, store)
    async with observers.of_errors():
        with observers.watch(runner.counters, runner.summary):
            result = await runner.run()
    await observers.of_result(result)
    """

    def __init__(self, loaded: LoadedSpec, store: RunStore) -> None:
        self._observers = OBSERVE_RUN.made(written(loaded.spec), loaded, store)

    @asynccontextmanager
    async def of_errors(self) -> AsyncIterator[None]:
        """Report an error that the block raises, and let it pass."""
        try:
            yield
        except Exception as error:
            for observer in self._observers:
                await observer.failed(error)
            raise

    @contextmanager
    def watch(self, live: RunCounters, summary: RunSummary, busy: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Watch the counters while the block runs."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.watch(live, summary, busy))
            yield

    async def of_result(self, result: RunResult) -> None:
        """Report the end."""
        if not result.interrupted:
            for observer in self._observers:
                await observer.ended(result)
