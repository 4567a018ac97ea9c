"""HTTP/1.1 for one kind of work: many small JSON requests to few servers, over connections that stay open.

It knows nothing about SGLang. No redirects, cookies, compression, proxies.

Invariant: a connection goes back to the free ones only after a whole reply was read and nothing is left over; in
every other case it is closed. So a reply can never be given to another request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from engine.backends.sglang.connection import MAX_BODY, Connection, HttpFailure, HttpReply, Room


class HttpClient:
    """Requests to one server.

        client = HttpClient("http://127.0.0.1:30000", headers={"Authorization": "Bearer …"})
        reply = await client.request("POST", "/generate", b'{"input_ids":[1]}')
        reply.status, reply.body
        await client.close()

    Connections are opened as they are needed, and the one used last is used next. A connection that the
    server closed while it was idle is noticed, and the request goes out once more on a fresh one.
    """

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, connect_timeout: float = 10.0) -> None:
        """Nothing is opened yet.

        Args:
            url: `http://host:port` or `https://host:port`, and a path that all requests share.
            headers: sent with every request.
            connect_timeout: seconds that opening a connection may take.

        Raises:
            ValueError: the URL is none of these.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no server's URL; write http://host:port")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout = connect_timeout
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        for name, value in lines.items():
            if any(character in f"{name}{value}" for character in "\r\n"):
                raise ValueError(f"the header {name} holds a line break")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._heads: dict[tuple[str, str], bytes] = {}
        self._connection = partial(Connection, Room(), {})
        self._free: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self.opened = 0
        """Connections opened so far."""

    async def request(
        self,
        method: str,
        path: str,
        *body: bytes,
        read: Callable[[int, bytes], Any] | None = None,
        most: int = MAX_BODY,
    ) -> HttpReply:
        """Send one request and read its whole reply, whatever its status. Cancelling it closes its connection.

        Args:
            method: such as `POST`.
            path: after the URL's own.
            body: pieces that make up the body, joined once.
            read: called with status and body where the reply arrives, while its bytes are at hand: later they have to be
                fetched again. It must not raise. The reply then has no body but what this made of it. Where it gives an
                exception, the reply may belong to another request, so the connection is not used again.
            most: bytes that the reply's body may have.

        Raises:
            HttpFailure: no connection, or it broke; MalformedReply: what came is not HTTP.
        """
        head = self._heads.get((method, path))
        if head is None:
            text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: "
            head = self._heads[method, path] = text.encode("latin-1")
        pieces = (head, b"%d\r\n\r\n" % sum(map(len, body)), *body)
        loop = asyncio.get_running_loop()
        fresh = False
        while True:
            connection = (None if fresh else self._idle()) or await self._open(loop)
            self._busy.add(connection)
            try:
                reply = await connection.send(pieces, loop, read, most)
            except HttpFailure as failure:
                connection.close()
                if fresh or failure.answered or not failure.reused:
                    raise
                fresh = True
                continue
            except BaseException:
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if isinstance(reply.read, Exception):
                connection.close()
            elif not connection.closing:
                self._free.append(connection)
            return reply

    def _idle(self) -> Connection | None:
        """The connection used last, where one is free."""
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                return connection
        return None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(self._connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise HttpFailure(
                f"{self.url} did not accept a connection within {self._connect_timeout:g} s", sent=False
            ) from None
        except OSError as error:
            raise HttpFailure(f"{self.url} cannot be reached: {error}", sent=False) from error
        self.opened += 1
        return connection

    def drop_idle(self) -> None:
        """Close the connections that no request uses."""
        while self._free:
            self._free.pop().close()

    def abandon(self, reason: str) -> None:
        """Close every connection; requests in flight fail with `reason`."""
        self.drop_idle()
        for connection in list(self._busy):
            connection.fail(HttpFailure(reason))

    async def close(self) -> None:
        """Close every connection. Requests in flight fail."""
        self.abandon("the client was closed")
        await asyncio.sleep(0)  # transports report their end in the loop's next round
