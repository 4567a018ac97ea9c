"""Waiting in a training: for work that a request to stop cancels, and for work that nothing cuts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event | None, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if `stop` is set first. Then `work` is cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait()) if stop is not None else None
    waits = [waiting for waiting in (task, stopped) if waiting is not None]
    try:
        await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        return task.result() if task.done() else None
    finally:
        for waiting in waits:
            waiting.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that runs in a thread, in which it cannot be stopped: a cancellation waits for its end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await work
        raise
