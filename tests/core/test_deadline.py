"""One timer for many deadlines."""

from __future__ import annotations

import asyncio

import pytest

from engine.deadline import Deadlines


async def test_a_call_that_is_late_ends_and_one_that_is_not_goes_on() -> None:
    deadlines = Deadlines(0.05)

    async def call(seconds: float) -> str:
        try:
            with deadlines.begin():
                await asyncio.sleep(seconds)
        except TimeoutError:
            return "late"
        return "done"

    async def later(seconds: float) -> str:
        await asyncio.sleep(0.03)
        return await call(seconds)

    calls = [call(0.0), call(9.0), call(0.01), later(0.03), later(9.0)]
    assert await asyncio.gather(*calls) == ["done", "late", "done", "done", "late"]
    assert not deadlines.calls


async def test_one_timer_serves_all_calls() -> None:
    loop = asyncio.get_running_loop()
    set_at: list[float] = []
    plain = loop.call_at
    loop.call_at = lambda when, *rest, **words: set_at.append(when) or plain(when, *rest, **words)  # type: ignore[method-assign]
    deadlines = Deadlines(60.0)
    for _ in range(100):
        with deadlines.begin():
            pass
    assert len(set_at) == 1
    assert deadlines._timer is not None
    deadlines._timer.cancel()


async def test_what_is_cancelled_from_outside_stays_cancelled() -> None:
    deadlines = Deadlines(0.02)

    async def stubborn() -> None:
        with deadlines.begin():
            try:
                await asyncio.sleep(9.0)
            finally:
                await asyncio.sleep(0.03)  # the time ends while it cleans up

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_of_the_calls_own_is_not_taken_for_the_deadline() -> None:
    deadlines = Deadlines(60.0)
    deadline = deadlines.begin()
    with pytest.raises(TimeoutError, match="mine"), deadline:
        raise TimeoutError("mine")
    assert not deadline.over
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_task_that_met_its_deadline_is_not_left_cancelled() -> None:
    with pytest.raises(TimeoutError), Deadlines(0.01).begin():
        await asyncio.sleep(9.0)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    await asyncio.sleep(0)


def test_it_serves_one_event_loop_after_another() -> None:
    deadlines = Deadlines(0.02)

    async def late() -> bool:
        try:
            with deadlines.begin():
                await asyncio.sleep(9.0)
        except TimeoutError:
            return True
        return False

    assert [asyncio.run(late()), asyncio.run(late())] == [True, True]


class _Call:
    """A watched call, which notes when it is struck."""

    ends = 0.0

    def __init__(self) -> None:
        self.struck = asyncio.Event()

    def strike(self) -> None:
        self.struck.set()


async def test_a_watched_call_is_struck_once_and_one_that_ended_is_not() -> None:
    deadlines = Deadlines(0.02)
    late, ended = _Call(), _Call()
    deadlines.watch(late)
    deadlines.watch(ended)
    del deadlines.calls[ended]
    await late.struck.wait()
    assert not deadlines.calls
    assert not ended.struck.is_set()


async def test_a_paused_call_keeps_the_time_that_was_left() -> None:
    deadlines, call = Deadlines(0.02), _Call()
    deadlines.watch(call)
    deadlines.pause()
    left = call.ends - deadlines.now()
    await asyncio.sleep(0.04)
    assert not call.struck.is_set()
    deadlines.resume()
    assert 0 < call.ends - deadlines.now() <= left
    await call.struck.wait()
