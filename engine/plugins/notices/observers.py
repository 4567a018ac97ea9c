"""The observers of runs and of trainings that send notices, and the thread that sends `stalled` and `budget`
meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from engine.errors import EngineError, TrainError
from engine.plugins.notices.notifier import Notifier
from engine.plugins.notices.spec import NotifySpec
from engine.runner.observers import TrainingObserver

if TYPE_CHECKING:
    from engine.plugins.notices.notifier import Notifier
    from engine.plugins.notices.spec import NotifySpec
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunResult, RunSummary
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore

POLL = 1.0
"""Seconds between two looks at the budget."""


class Watch:
    """Sends `stalled` if nothing happens for too long, once per stall, and `budget` once for each amount that is
    reached.

        with Watch(notifier, spec.notify, lambda: {"step": trainer.step}) as watch:
            watch.tick()        # at each episode and each step

    It has its own thread, so it also notices an event loop that hangs.
    """

    def __init__(
        self,
        notifier: Notifier,
        spec: NotifySpec,
        about: Callable[[], Mapping[str, Any]] = dict,
        *,
        tokens: Callable[[], int] = lambda: 0,
        progress: Callable[[], object] | None = None,
        waits_for: str = "no episode and no step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            notifier: Sends the events.
            spec: `stall_timeout` and `budget`.
            about: Returns more fields for the events.
            tokens: Returns the number of tokens that were sampled since the launch.
            progress: A change of its value is progress too, so that a busy loop needs no calls of `tick`.
            waits_for: The start of a stall's reason.
            clock: A monotonic clock, in seconds.
        """
        self._notifier = notifier
        self._seconds = spec.stall_timeout
        self._budget = spec.budget
        self._about = about
        self._tokens = tokens
        self._progress = progress
        self._waits_for = waits_for
        self._clock = clock
        self._began = self._last = clock()
        self._value: object = None
        self._stall_sent = False
        self._exceeded: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice-watch", daemon=True)

    def tick(self) -> None:
        """Report progress. Costs less than a microsecond; any thread can call it."""
        self._last = self._clock()
        self._stall_sent = False

    def check(self) -> float:
        """Send the notices that are due.

        Returns:
            Seconds until the next check is useful.
        """
        polls = [POLL] if self.check_budget() else []
        if self._progress is not None:
            if (value := self._progress()) != self._value:
                self._value = value
                self.tick()
            polls.append(self._seconds / 4)
        quiet = self._clock() - self._last
        if quiet < self._seconds:
            return min([self._seconds - quiet, *polls])
        if not self._stall_sent:
            self._stall_sent = True
            reason = f"{self._waits_for} for {quiet:.0f} s"
            self._notifier.notify_now("stalled", **self._fields(), seconds=quiet, reason=reason)
        return min([self._seconds, *polls])

    def check_budget(self) -> bool:
        """Send the notices of amounts that are reached. Returns whether one is not reached yet."""
        if self._budget is None:
            return False
        used_of = {"tokens": self._tokens(), "seconds": self._clock() - self._began}
        limits = {"tokens": self._budget.tokens, "seconds": self._budget.time}
        for name, most in limits.items():
            if most is not None and name not in self._exceeded and (used := used_of[name]) >= most:
                self._exceeded.add(name)
                fields = {**self._fields(), name: used}
                self._notifier.notify_now("budget", **fields, reason=f"{used:.0f} of {most:.0f} {name} are used")
        return any(most is not None and name not in self._exceeded for name, most in limits.items())

    def _fields(self) -> dict[str, Any]:
        try:
            return dict(self._about())
        except Exception as error:  # noqa: BLE001  the event is sent without these fields
            return {"problem": repr(error)}

    def _watch(self) -> None:
        wait = 0.0
        while not self._ended.wait(wait):
            wait = max(self.check(), 0.001)

    def close(self) -> None:
        """End the watch."""
        self._ended.set()

    def __enter__(self) -> Self:
        self._began = self._clock()
        self.tick()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check_budget()  # an amount that was reached after the last look


class RunNotices:
    """Sends the notices that `notify` of the spec asks for. It is a `RunObserver`."""

    def __init__(self, loaded: LoadedSpec, store: RunStore) -> None:
        """
        Raises:
            EngineError: a channel cannot work.
        """
        what = "evaluation" if store.header.evaluation else "run"
        self._spec = NotifySpec.or_default(loaded.spec)
        self._notifier = Notifier(self._spec, store.run_id, what, folder=store.folder, base=loaded.base)

    async def failed(self, error: Exception) -> None:
        """Send `failed`."""
        await self._notifier.notify("failed", reason=f"{type(error).__name__}: {error}")

    def watch(self, live: RunCounters, summary: RunSummary, busy: Callable[[], bool]) -> Watch:
        """The thread that sends `stalled` and `budget` while episodes run, by their counts.

        Args:
            live: Counters of the run.
            summary: Sums over its finished episodes.
            busy: Whether an episode runs. Without one nothing stalls: a service waits for its next request.
        """
        return Watch(
            self._notifier,
            self._spec,
            lambda: {**_counts(summary), "sampled_tokens": live.tokens},
            tokens=lambda: live.tokens,
            progress=lambda: (live.tokens, summary.episodes) if busy() else object(),
            waits_for="no reply and no finished episode",
        )

    async def ended(self, result: RunResult) -> None:
        """Send `finished`, or `failed` if the run failed as a whole."""
        counts = _counts(result.summary)
        if (stopped := result.stopped) is not None:
            kind = "budget" if stopped.kind == "budget_reached" else "failed"
            await self._notifier.notify(kind, reason=f"{type(stopped).__name__}: {stopped}", **counts)
        elif result.summary.backend_failed:
            blamed = result.summary.causes.blamed("backend")
            reason = f"the backend failed {blamed} of {result.summary.episodes} episodes"
            await self._notifier.notify("failed", reason=reason, **counts)
        elif result.faults:
            reason = f"{len(result.faults)} episodes could not be finished; the first: {result.faults[0]}"
            await self._notifier.notify("failed", reason=reason, **counts)
        elif result.summary.all_failed:
            await self._notifier.notify("failed", reason=result.summary.causes.words(result.summary.episodes), **counts)
        else:
            summary = result.summary
            failed = f", {summary.causes.failures} failed" if summary.causes.failures else ""
            reason = (
                f"{summary.episodes} episodes, {summary.solved} solved{failed}, mean reward {summary.mean_reward:.3f}"
            )
            await self._notifier.notify("finished", reason=reason, **counts)


def _counts(summary: RunSummary) -> dict[str, Any]:
    return {
        "episodes": summary.episodes,
        "solved": summary.solved,
        "failed_episodes": summary.causes.failures,
        "mean_reward": summary.mean_reward,
    }


class TrainingNotices(TrainingObserver):
    """Sends the notices that `notify` of the spec asks for."""

    def __init__(self, loaded: LoadedSpec, folder: Path) -> None:
        """
        Raises:
            EngineError: a channel cannot work.
        """
        self._spec = NotifySpec.or_default(loaded.spec)
        self._notifier = Notifier(self._spec, folder.name, "training", folder=folder, base=loaded.base)
        self._watch: Watch | None = None

    @contextmanager
    def watch(self, step: Callable[[], int], tokens: Callable[[], int]) -> Iterator[None]:
        """The thread that sends `stalled` and `budget`."""
        with Watch(self._notifier, self._spec, lambda: {"step": step()}, tokens=tokens) as self._watch:
            yield

    def progressed(self) -> None:
        """It has not stalled."""
        if self._watch is not None:
            self._watch.tick()

    async def lacks_signal(self, step: int, reason: str) -> None:
        """Send `no_signal`."""
        await self._notifier.notify("no_signal", step=step, reason=reason)

    async def failed(self, error: Exception, step: int) -> None:
        """Send `failed`, `diverged` or `budget`."""
        diverged = isinstance(error, TrainError) and error.kind == "diverged"
        kind, words = "diverged" if diverged else "failed", str(error)
        if isinstance(error, EngineError) and error.kind == "budget_reached":
            kind, words = "budget", words.partition("\n")[0]  # the state that was saved differs at each resume
        await self._notifier.notify(kind, step=step, reason=f"{type(error).__name__}: {words}")

    async def ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send `finished`."""
        rewards = {name: metrics[name] for name in ("reward/mean", "eval/reward") if name in metrics}
        named = {name.replace("/", "_"): value for name, value in rewards.items()}
        await self._notifier.notify("finished", step=step, **named)
