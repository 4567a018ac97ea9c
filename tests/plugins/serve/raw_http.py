"""The three services that speak HTTP, and bytes that are sent to them as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from serve_kit import TOKEN, serving, unpacked, written
from test_episode_service import TOKEN as OPENER
from test_episode_service import served_spec
from test_episode_service import serving as serving_episodes
from wire_kit import endpoint

SERVICES = ("agents", "groups", "episodes")


class Service(NamedTuple):
    """A running service."""

    address: str
    token: str
    good: str
    """A path that its token may get."""
    posts: str
    """A path that its token may post to."""

    def head(self, method: str, path: str, *headers: str, token: str | None = None) -> bytes:
        """The head of a request, with the service's token or another one; an empty one: without a token."""
        token = self.token if token is None else token
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: x",
            *([f"Authorization: Bearer {token}"] if token else []),
            *headers,
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Answer(NamedTuple):
    """What came back."""

    status: int
    """0: nothing."""
    value: Any
    closes: bool
    """Whether the service closed the connection."""


@asynccontextmanager
async def service_of(kind: str, folder: Path, tokenizer: Path) -> AsyncIterator[Service]:
    """One of `SERVICES`."""
    if kind == "agents":
        async with endpoint() as (address, _):
            yield Service(address, "key", "/v1/models", "/v1/chat/completions")
    elif kind == "groups":
        unpacked(folder)
        async with serving(written(folder)) as (_, address):
            yield Service(address, TOKEN, "/weights", "/groups")
    else:
        async with serving_episodes(served_spec(folder, tokenizer, ["It is 42."]), folder / "runs") as client:
            yield Service(client.address, OPENER, "/health", "/episodes")


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 26)


async def read_answer(reader: asyncio.StreamReader, *, bodyless: bool = False) -> Answer:
    """The next answer on a connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if lines[0].split()[1] == "100":
            return await read_answer(reader)
        body = b"" if bodyless else await reader.readexactly(int(headers["content-length"]))
        closes = headers.get("connection") == "close"
        if closes:
            assert await reader.read() == b""
        return Answer(int(lines[0].split()[1]), json.loads(body) if body else None, closes)
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(0, None, closes=True)


async def send(address: str, data: bytes, *, bodyless: bool = False, more: bool = False) -> Answer:
    """Send bytes on a connection of their own, and read one answer. With `more`, the sender does not say that nothing follows."""
    reader, writer = await connect(address)
    try:
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            pass
        return await read_answer(reader, bodyless=bodyless)
    finally:
        writer.close()


async def check_lives(service: Service) -> None:
    """A client with the token gets its answer."""
    assert (await send(service.address, service.head("GET", service.good))).status == 200
