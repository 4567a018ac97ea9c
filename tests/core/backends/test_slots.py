"""Generation slots."""

from __future__ import annotations

import asyncio

import pytest

from engine.backends.slots import Slots


class _Work:
    def __init__(self, name: str, started: list[str], *, needed: bool = True) -> None:
        self.name = name
        self.started = started
        self.needed = needed

    def start(self) -> bool:
        if self.needed:
            self.started.append(self.name)
        return self.needed


def test_ending_work_starts_the_work_that_has_waited_longest() -> None:
    started: list[str] = []
    slots = Slots(1)
    for name in ("first", "second", "third"):
        slots.take(_Work(name, started).start)
    assert started == ["first"]
    slots.end()
    assert started == ["first", "second"]
    slots.end()
    slots.end()
    assert (started, slots.free) == (["first", "second", "third"], 1)


def test_work_that_is_not_needed_any_more_holds_no_slot() -> None:
    started: list[str] = []
    slots = Slots(1)
    slots.take(_Work("given up", started, needed=False).start)
    assert slots.free == 1
    slots.take(_Work("first", started).start)
    slots.take(_Work("given up", started, needed=False).start)
    slots.take(_Work("second", started).start)
    slots.end()
    assert (started, slots.free) == (["first", "second"], 0)


async def test_no_more_coroutines_run_than_there_are_slots() -> None:
    slots, running, most = Slots(2), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with slots:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(work() for _ in range(10)))
    assert (most, slots.free) == (2, 2)


@pytest.mark.parametrize("given", [False, True])
async def test_a_coroutine_that_is_cancelled_while_it_waits_takes_no_slot_along(given: bool) -> None:
    slots = Slots(1)
    slots.free = 0

    async def work() -> None:
        async with slots:
            raise AssertionError("it was cancelled")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    if given:
        slots.end()  # it is woken in the next round of the loop, and cancelled before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not given:
        slots.end()
    assert slots.free == 1
