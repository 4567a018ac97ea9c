"""A starved process: how late the main loop is, and the time that calls get once more for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, cast

import pytest

from engine.actions.calling import code_call
from engine.actions.calling.code_call import STARVED_SHARE, call_spec_code
from engine.actions.calling.workers import TICK, LoopDelay, Workers
from engine.deadline import Deadlines
from engine.errors import SpecCodeError


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


class HandClock:
    """A loop whose time and timers a test moves by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Any] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, function: Any) -> None:
        self.timers.append((when, function))

    def ring(self, now: float) -> None:
        self.now = now
        ((_, function),) = self.timers
        self.timers.clear()
        function()


def begin(delay: LoopDelay, loop: asyncio.AbstractEventLoop) -> float:
    """Begin a call, as `Workers.begin`."""
    if delay.loop is loop:
        delay.calls += 1
    else:
        delay.start(loop)
    return delay.seconds


def test_the_delay_is_what_the_timer_is_late() -> None:
    clock, delay = HandClock(), LoopDelay()
    loop = cast("asyncio.AbstractEventLoop", clock)
    before = begin(delay, loop)
    assert [when for when, _ in clock.timers] == [TICK]
    clock.ring(TICK)
    assert delay.since(before) == 0
    clock.ring(2 * TICK + 0.5)
    assert delay.since(before) == pytest.approx(0.5)
    later = begin(delay, loop)
    clock.now += TICK + 0.25  # not rung yet
    assert delay.since(before) == pytest.approx(0.75)
    assert delay.since(later) == pytest.approx(0.25)


def test_the_timer_runs_only_while_there_are_calls() -> None:
    clock, delay = HandClock(), LoopDelay()
    loop = cast("asyncio.AbstractEventLoop", clock)
    begin(delay, loop)
    begin(delay, loop)
    delay.calls -= 1
    clock.ring(TICK)
    assert len(clock.timers) == 1
    delay.calls -= 1
    clock.ring(2 * TICK)
    assert not clock.timers
    before = begin(delay, loop)
    assert len(clock.timers) == 1
    assert delay.since(before) == 0


async def test_a_call_that_starved_gets_its_time_once_more(workers: Workers) -> None:
    release = threading.Event()
    asyncio.get_running_loop().call_later(0.05, time.sleep, 0.5)  # the loop is late for more than the whole deadline
    asyncio.get_running_loop().call_later(0.06, release.set)  # after that
    assert await call_spec_code(workers, release.wait, 60, seconds=0.4, blame="user", what="user")


@pytest.mark.parametrize(("share", "times"), [(0.99, 1), (1.01, 2), (1e9, 2)])
async def test_it_is_given_once_and_from_a_share_of_the_deadline_on(
    workers: Workers, share: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, release, deadlines = 0.02, threading.Event(), []

    class Counted(Deadlines):
        def __init__(self, seconds: float) -> None:
            deadlines.append(seconds)
            super().__init__(seconds)

    monkeypatch.setattr(code_call, "Deadlines", Counted)
    monkeypatch.setattr(workers, "_deadlines", cache(Counted))
    monkeypatch.setattr(workers.threads, "remaining", lambda call, seconds: -1.0)  # whenever its thread began
    monkeypatch.setattr(LoopDelay, "since", lambda delay, before: share * STARVED_SHARE * seconds)
    with pytest.raises(SpecCodeError, match=r"did not answer within 0\.02 s"):
        await call_spec_code(workers, release.wait, seconds=seconds, blame="user", what="user")
    assert deadlines == [seconds] * times
    release.set()
