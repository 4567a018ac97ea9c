"""Slots: as many at once as there are, first come first served, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from engine.actions.slots import Slots


async def test_no_more_than_there_are_and_in_the_order_of_coming() -> None:
    slots, inside, most = Slots(3), 0, 0
    order: list[int] = []

    async def one(number: int) -> None:
        nonlocal inside, most
        async with slots:
            order.append(number)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(one(number) for number in range(20)))
    assert (most, inside, order) == (3, 0, list(range(20)))
    assert [slots.take() for _ in range(4)] == [True, True, True, False]


async def test_a_slot_goes_to_who_waits_and_nobody_overtakes() -> None:
    slots = Slots(1)
    assert slots.take()
    waiting = asyncio.create_task(slots.wait())
    await asyncio.sleep(0)
    slots.give()
    assert not slots.take()  # it has an owner, who does not know it yet
    await waiting
    slots.give()
    assert slots.take()


async def test_who_is_cancelled_while_waiting_takes_none() -> None:
    slots = Slots(1)
    assert slots.take()
    first, second = asyncio.create_task(slots.wait()), asyncio.create_task(slots.wait())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    slots.give()
    await asyncio.wait_for(second, 1)


async def test_who_is_cancelled_with_a_slot_on_its_way_hands_it_on() -> None:
    slots = Slots(1)
    assert slots.take()
    first, second = asyncio.create_task(slots.wait()), asyncio.create_task(slots.wait())
    await asyncio.sleep(0)
    slots.give()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 1)
    slots.give()
    assert slots.take()


async def test_a_slot_is_given_back_whatever_happens() -> None:
    slots = Slots(1)
    with pytest.raises(ValueError, match="no"):
        async with slots:
            raise ValueError("no")
    assert slots.take()


def test_without_slots_nobody_would_ever_get_in() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        Slots(0)
