"""A JSON request to one of few servers -> its reply, over HTTP/1.1 connections that stay open.

No redirects, cookies, compression, proxies.

Invariant: a connection becomes free only after a whole reply was read and no byte is left over; in every other case it is
closed. So a reply can never be given to another request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from urllib.parse import urlsplit

from engine.backends.http.connection import Connection, HttpCall, SharedBuffer
from engine.backends.http.framing import MAX_BODY, KnownHeads, ReplyReader
from engine.backends.http.reply import HttpFailure, HttpReply


class HttpClient:
    """Requests to one server.

        client = HttpClient("http://127.0.0.1:30000", headers={"Authorization": "Bearer …"})
        reply = await client.request("POST", "/generate", b'{"input_ids":[1]}')
        reply.status, reply.body
        await client.close()

    Connections are opened when they are needed, and the one used last is used next. If the server closed a connection while
    it was idle, the request is sent once more on a fresh one.
    """

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, connect_timeout: float = 10.0) -> None:
        """Nothing is opened yet.

        Args:
            url: `http://host:port` or `https://host:port`, with a path that all requests share.
            headers: Sent with every request.
            connect_timeout: Time limit for opening a connection, in seconds.

        Raises:
            ValueError: The URL is not of this form, or a header holds a line break.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not the URL of a server; write http://host:port")
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
        self._buffer = SharedBuffer()
        self._known_heads: KnownHeads = {}
        self._free: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.opened = 0
        """Number of connections opened so far."""

    async def request(self, method: str, path: str, *body: bytes, most: int = MAX_BODY) -> HttpReply:
        """Send one request and read its whole reply, whatever its status. Cancelling it closes its connection.

        Args:
            method: Such as `POST`.
            path: Added to the URL's own path.
            body: The pieces of the body.
            most: Maximum size of the reply's body in bytes.

        Returns:
            The reply.

        Raises:
            HttpFailure: No connection could be opened, or it was lost.
            MalformedReply: The server's bytes are not HTTP, or the reply is too large.
        """
        call = _AwaitedCall(self.pieces(method, path, *body), most)
        self.start(call)
        try:
            reply: HttpReply = await call.over
            return reply
        except asyncio.CancelledError:
            self.give_up(call)
            raise

    def pieces(self, method: str, path: str, *body: bytes) -> tuple[bytes, ...]:
        """A whole request: its head and the pieces of its body."""
        head = self._heads.get((method, path))
        if head is None:
            text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: "
            head = self._heads[method, path] = text.encode("latin-1")
        return (head, b"%d\r\n\r\n" % sum(map(len, body)), *body)

    def start(self, call: HttpCall) -> None:
        """Send a request on the free connection that was used last, or on a new one."""
        while self._free and not call.fresh:
            connection = self._free.pop()
            if not connection.closing:
                self._busy.add(connection)
                call.connection = connection
                connection.send(call)
                return
        call.opening = asyncio.get_running_loop().create_task(self._open_for(call))
        self._opening.add(call.opening)
        call.opening.add_done_callback(self._opening.discard)

    def give_up(self, call: HttpCall) -> None:
        """Close the connection of a request whose reply is not wanted any more."""
        if (opening := call.opening) is not None:
            call.opening = None
            opening.cancel()
        if call.connection is not None and call.connection.call is call:
            self._busy.discard(call.connection)
            call.connection.close()

    async def _open_for(self, call: HttpCall) -> None:
        try:
            connection = await self._open(asyncio.get_running_loop())
        except HttpFailure as failure:
            call.opening = None
            call.lost(failure)
            return
        except asyncio.CancelledError:
            if call.opening is not None:  # it was not given up
                call.lost(HttpFailure("the client was closed", sent=False))
            raise
        call.opening = None
        self._busy.add(connection)
        call.connection = connection
        connection.send(call)

    # -- ConnectionOwner

    def ended(self, connection: Connection, *, usable: bool) -> None:
        """See `ConnectionOwner.ended`."""
        self._busy.discard(connection)
        if usable:
            self._free.append(connection)

    def failed(self, connection: Connection, call: HttpCall, failure: HttpFailure) -> None:
        """See `ConnectionOwner.failed`. A request whose connection the server had closed while it was idle is sent once more."""
        self._busy.discard(connection)
        call.connection = None
        if call.fresh or failure.answered or not failure.reused:
            call.lost(failure)
        else:
            call.fresh = True
            self.start(call)

    def _new_connection(self) -> Connection:
        return Connection(self._buffer, ReplyReader(self._known_heads), self)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    self._new_connection, self._host, self._port, ssl=self._tls
                )
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
        for opening in list(self._opening):
            opening.cancel()
        await asyncio.sleep(0)  # transports report their end in the next round of the loop


class _AwaitedCall(HttpCall):
    """A request whose reply a coroutine waits for."""

    __slots__ = ()

    def received(self, status: int, body: bytes, retry_after: float | None, head: bytes) -> bool:
        if not self.over.done():
            self.over.set_result(HttpReply(status, body, retry_after, head))
        return True

    def lost(self, failure: HttpFailure) -> None:
        if not self.over.done():
            self.over.set_exception(failure)
