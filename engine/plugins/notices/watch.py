"""A thread that sends the notices `stalled` and `budget` while a run or a training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from engine.plugins.notices.notifier import Notifier
    from engine.plugins.notices.spec import NotifySpec

POLL = 1.0
"""Seconds between two looks at the budget."""


class Watch:
    """Sends `stalled` if nothing happens for too long, once per stall, and `budget` once for each amount that is reached.

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
        self._told = False
        self._exceeded: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice-watch", daemon=True)

    def tick(self) -> None:
        """Report progress. Costs less than a microsecond; any thread can call it."""
        self._last = self._clock()
        self._told = False

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
        if not self._told:
            self._told = True
            reason = f"{self._waits_for} for {quiet:.0f} s"
            self._notifier.notify_now("stalled", **self._fields(), seconds=quiet, reason=reason)
        return min([self._seconds, *polls])

    def check_budget(self) -> bool:
        """Send the notices of amounts that are reached. Returns whether one is not reached yet."""
        if self._budget is None:
            return False
        limits = {"tokens": (self._budget.tokens, self._tokens), "seconds": (self._budget.time, self._time)}
        for name, (most, count) in limits.items():
            if most is not None and name not in self._exceeded and (used := count()) >= most:
                self._exceeded.add(name)
                fields = {**self._fields(), name: used}
                self._notifier.notify_now("budget", **fields, reason=f"{used:.0f} of {most:.0f} {name} are used")
        return any(most is not None and name not in self._exceeded for name, (most, _) in limits.items())

    def _time(self) -> float:
        return self._clock() - self._began

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
