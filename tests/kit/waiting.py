"""Waiting for what other threads and processes do: the machine may be slow, so only what never comes fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until it holds.

    Raises:
        AssertionError: It does not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.02)


async def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until it holds, and let the other tasks of the loop go on. Raises AssertionError as `wait_until`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        await asyncio.sleep(0.01)


def process_runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
