"""Notices of one training: while it goes on, when it fails or diverges, and when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, TrainError
from engine.plugins.notices.notifier import Notifier
from engine.plugins.notices.spec import NotifySpec
from engine.plugins.notices.watch import Watch
from engine.runner.observers import TrainingObserver

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


class TrainingNotices(TrainingObserver):
    """Sends the notices that `notify` of the spec asks for."""

    def __init__(self, loaded: LoadedSpec, folder: Path) -> None:
        """
        Raises:
            NoticeError: a channel cannot work.
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
        await self._notifier.notify("finished", step=step, **_notified(metrics))


def _notified(values: Mapping[str, float]) -> dict[str, float]:
    names = ("reward/mean", "eval/reward")
    return {name.replace("/", "_"): value for name, value in values.items() if name in names}


def observe(loaded: LoadedSpec, folder: Path) -> TrainingNotices:
    """The hook `observe_training`."""
    return TrainingNotices(loaded, folder)
