"""Functions that give servers weights, and how they are called for several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from engine.backends.servers.server import Server
from engine.errors import BackendError

UPDATE_SECONDS = 600.0
"""Time limit for loading weights or an adapter, in seconds."""

Load = Callable[[Server, bool], Awaitable[None]]
"""Gives a server weights; the bool says whether the prefixes that it has cached are dropped. Raises BackendError."""
LoadAll = Callable[[list[Server], bool], Awaitable[list[BaseException | None]]]
"""Gives several servers weights at once, as `Load`. Returns the error of each server, in order; None: it has them."""


def separately(load: Load) -> LoadAll:
    """Load each server by itself, all at once."""

    async def load_all(servers: list[Server], flush: bool) -> list[BaseException | None]:
        return await asyncio.gather(*(load(server, flush) for server in servers), return_exceptions=True)

    return load_all


def from_disk(path: str, version: int, load_format: str | None = None) -> Load:
    """A function that loads the weights of a folder on a server."""

    async def load(server: Server, flush: bool) -> None:
        body: dict[str, Any] = {"model_path": path, "weight_version": str(version), "flush_cache": flush}
        if load_format is not None:
            body["load_format"] = load_format
        reply = await server.json("POST", "/update_weights_from_disk", body, timeout=UPDATE_SECONDS)
        if not reply.get("success"):
            raise BackendError(f"{server.url}: {reply.get('message')}", kind="update_failed")

    return load
