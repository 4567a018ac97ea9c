"""Clocks -> they stand still together while no server can be reached: those of episodes, of actions, and of blocks of
code. And a call that waits for rounds of an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.deadline import Deadlines

Clock: TypeAlias = "Deadlines | EpisodeDeadline | PausableClocks"
"""What `pause` lets stand still, until `resume`."""

ROUNDS = 4
"""Rounds of an event loop in which work for another thread is gathered."""


def after_rounds(loop: asyncio.AbstractEventLoop, callback: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Call a function after some rounds of an event loop.

    An idle loop has them at once. One that has much to do gathers meanwhile what another thread then does together:
    each hand-over takes the processor and its caches from the loop (measured: commits after four rounds in place of one
    are half as many, and take 6 % from a turn).
    """
    if rounds:
        loop.call_soon(after_rounds, loop, callback, rounds - 1)
    else:
        callback()


@dataclass(eq=False)
class PausableClocks:
    """Clocks that are paused together. It is a clock itself; after two calls of `pause` it continues at the second
    `resume`."""

    _clocks: dict[Clock, None] = field(default_factory=dict, init=False)
    _pauses: int = field(default=0, init=False)

    def add(self, clock: Clock) -> None:
        """Add a clock. If the others are paused, it is paused at once."""
        self._clocks[clock] = None
        if self._pauses:
            clock.pause()

    def remove(self, clock: Clock) -> None:
        """Remove a clock. If it is paused, it continues."""
        if self._clocks.pop(clock, clock) is None and self._pauses:
            clock.resume()

    def pause(self) -> None:
        """Pause all clocks."""
        self._pauses += 1
        if self._pauses == 1:
            for clock in list(self._clocks):
                clock.pause()

    def resume(self) -> None:
        """Resume all clocks at the last of several calls."""
        self._pauses -= 1
        if not self._pauses:
            for clock in list(self._clocks):
                clock.resume()

    @contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """A deadline that is paused together with the other clocks.

        Raises:
            TimeoutError: The block took longer than `seconds`.
        """
        clock = Deadlines(seconds)
        self.add(clock)
        try:
            with clock.begin():
                yield
        finally:
            self.remove(clock)


class EpisodeDeadline:
    """The deadline of one episode: it interrupts the action that runs when the time ends. One timer serves all actions.

        deadline = EpisodeDeadline(60.0, spent=0.0)
        deadline.acting = True
        await action.perform(episode, objects)  # CancelledError, and `over` is set, if the time ends here
        deadline.acting = False
        deadline.stop()

    Args:
        seconds: Time limit of the episode.
        spent: Seconds that it has already used, before a resume.
    """

    __slots__ = ("_before", "_seconds", "_still", "_task", "_timer", "_withdrawn", "acting", "ends", "over", "stood")

    def __init__(self, seconds: float, spent: float) -> None:
        self._task = asyncio.current_task()
        self._seconds = seconds
        self._before = 0 if self._task is None else self._task.cancelling()
        self.acting = False
        """Whether an action runs: only then it is interrupted."""
        self._withdrawn = False
        self._still: float | None = None
        self.stood = 0.0
        """Seconds for which it was paused."""
        self.over = False
        """Whether it interrupted an action."""
        self.ends = time.perf_counter() + seconds - spent
        """End of the time, by `perf_counter`."""
        self._timer = asyncio.get_running_loop().call_later(seconds - spent, self._strike)

    def spent(self, now: float) -> float:
        """Seconds that the episode has used at `now`, by `perf_counter`."""
        return self._seconds - self.ends + now

    def passed(self, now: float) -> bool:
        """Whether the time has ended at `now`, by `perf_counter`."""
        return (now if self._still is None else self._still) >= self.ends

    def stop(self) -> None:
        """End the deadline: the episode has ended."""
        self._timer.cancel()

    def pause(self) -> None:
        """Pause, because no server is reachable."""
        self._still = time.perf_counter()
        self._timer.cancel()

    def resume(self) -> None:
        """Continue with the time that was left."""
        if self._still is None:
            return
        now = time.perf_counter()
        stood, self._still = now - self._still, None
        self.stood += stood
        self.ends += stood
        if not self.over:
            self._timer = asyncio.get_running_loop().call_later(self.ends - now, self._strike)

    def withdraw(self) -> bool:
        """Withdraw the cancellation by which it interrupted an action. False: other code cancelled the task too."""
        if self._task is None or self._withdrawn:
            return False
        self._withdrawn = True
        return self._task.uncancel() <= self._before

    def _strike(self) -> None:
        # Between actions the episode waits for its journal, and that wait is never interrupted.
        if self.acting and self._task is not None:
            self.over = True
            self._task.cancel()
