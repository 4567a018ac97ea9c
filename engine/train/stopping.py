"""Waiting for work that a request to stop cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event | None, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if `stop` is set first. Then `work` is cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        await asyncio.wait([each for each in (task, stopped) if each is not None], return_when="FIRST_COMPLETED")
        return task.result() if task.done() else None
    finally:
        for each in (task, stopped):
            if each is not None:
                each.cancel()
        await asyncio.gather(task, return_exceptions=True)
