"""What a real server works on, by its own counts: tests wait for these, and not for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from engine.plugins.sglang.client import SGLangBackend

HANGS_AFTER = 100.0
"""Seconds after which a test fails that waits."""


async def until_works_on(backend: SGLangBackend, count: int) -> None:
    """Wait until the servers work on so many requests, or have them waiting."""
    await _until(backend, lambda loads: sum(_requests(load) for load in loads) == count)


async def until_samples(backend: SGLangBackend, tokens: int, requests: int = 1, url: str | None = None) -> None:
    """Wait until a server samples so many requests at once, and holds so many tokens of them, prompts included.

    Args:
        backend: The backend of the servers.
        tokens: The number of tokens.
        requests: The number of requests.
        url: The server; None: all of them together.
    """

    def samples(loads: list[dict[str, Any]]) -> bool:
        running = sum(load["num_running_reqs"] for load in loads)
        return running == requests and sum(load["num_used_tokens"] for load in loads) >= tokens

    await _until(backend, samples, url)


async def _until(backend: SGLangBackend, holds: Callable[[list[dict[str, Any]]], bool], url: str | None = None) -> None:
    async with asyncio.timeout(HANGS_AFTER):
        while True:
            asked = [server for server in backend.pool.workers if url in (None, server.url)]
            replies = [await server.json("GET", "/v1/loads") for server in asked]
            if holds([load for reply in replies for load in reply["loads"]]):
                return
            await asyncio.sleep(0.01)


def _requests(load: dict[str, Any]) -> int:
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def aborted(url: str) -> int:
    """How many requests a server has aborted while it worked on them."""
    lines = httpx.get(f"{url}/metrics", timeout=HANGS_AFTER).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_aborted_requests_total")))
