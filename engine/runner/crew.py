"""Tasks that work side by side until there is no more work, and how the process collects garbage meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


async def run_crew(work: Callable[[], Coroutine[Any, Any, None]], count: int, stops: Sequence[asyncio.Event]) -> None:
    """Run `work` in a number of tasks until all of them have ended. An event of `stops` cancels them.

    Args:
        work: Called once for each task.
        count: Number of tasks.
        stops: Events that end the work early.

    Raises:
        BaseException: the first error of a task, after all of them have ended; a cancellation by `stops` is none.
    """
    crew = [asyncio.create_task(work(), name=f"crew-{n}") for n in range(count)]
    watchers = [asyncio.create_task(_cancel_on(event, crew)) for event in stops]
    try:
        finished = await asyncio.gather(*crew, return_exceptions=True)
    except asyncio.CancelledError:
        for member in crew:
            member.cancel()
        await asyncio.gather(*crew, return_exceptions=True)
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
    for fault in finished:
        if isinstance(fault, BaseException) and not isinstance(fault, asyncio.CancelledError):
            raise fault


async def _cancel_on(event: asyncio.Event, crew: Sequence[asyncio.Task[None]]) -> None:
    await event.wait()
    for member in crew:
        member.cancel()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while many episodes are running.

    An episode's objects are freed by their reference counts. The cyclic collector only visits the live ones, at a cost that
    grows with their number. Objects that the caller has frozen stay frozen: nothing else is frozen then.
    """
    before = gc.get_threshold()
    frozen_by_caller = gc.get_freeze_count() > 1_000  # Python 3.12 freezes a few hundred when it starts
    if not frozen_by_caller:
        gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen_by_caller:
            gc.unfreeze()
