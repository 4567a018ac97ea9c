"""One HTTP/1.1 connection of an agent program: requests one after the other, and whether the program still reads its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import h11

MAX_BODY = 64 << 20
"""Maximum bytes of a request's body."""
_READ = 1 << 16


class TooLargeError(Exception):
    """A request's body is larger than `MAX_BODY`."""


class HttpRequest(NamedTuple):
    """One request."""

    method: str
    path: str
    """Without a query and a slash at its end."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes


class Connection:
    """One connection.

    An answer counts as received when its last byte was sent to a program that had not closed the connection, and the program's
    system took it: a program that closes with unread bytes resets the connection, and the next `request` raises ConnectionError.

    Args:
        reader: What the program sends.
        writer: What it gets.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ)
        self._reading: asyncio.Task[bytes] | None = None
        """A read that began while an answer was awaited."""
        self._unsent = bytearray()
        self.gone = False
        """Whether the program has closed the connection."""

    async def request(self) -> HttpRequest | None:
        """Wait for the next request; None if the program has closed the connection.

        Raises:
            ConnectionError: The connection was reset, so the program did not get all of the newest answer.
            TooLargeError: Its body is too large.
        """
        if self._http.our_state is h11.MUST_CLOSE:
            self._writer.write_eof()
            while await self._more():  # the program closes the connection, or resets it
                pass
            return None
        if self._http.our_state is h11.DONE:
            if self._http.their_state is not h11.DONE:
                return None
            self._http.start_next_cycle()
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise TooLargeError
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        path = head.target.decode("latin-1").partition("?")[0].rstrip("/")
        return HttpRequest(head.method.decode(), path, headers, bytes(body))

    async def _event(self) -> Any:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._more())

    async def _more(self) -> bytes:
        reading, self._reading = self._reading, None
        return await (reading or self._reader.read(_READ))

    async def until(self, answer: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until an answer is known, the program has closed the connection (`gone`), or some time has passed."""
        if self.gone:
            return
        self._reading = self._reading or asyncio.ensure_future(self._reader.read(_READ))
        await asyncio.wait([answer, self._reading], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._reading.done():
            return
        reading, self._reading = self._reading, None
        data = b"" if reading.exception() is not None else reading.result()
        self.gone = not data
        if data:  # the next request, which the program sent before it had this answer
            self._http.receive_data(data)

    # --- answers ------------------------------------------------------------------------------------------

    async def json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer.

        Raises:
            ConnectionError: The program has closed the connection.
        """
        data = json.dumps(value).encode()
        head = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        self._add(h11.Response(status_code=status, headers=list(head.items())))
        self._add(h11.Data(data=data))
        await self.end()

    def begin(self, content_type: str = "text/event-stream") -> None:
        """Begin an answer that is sent in parts: events, or what `content_type` says."""
        head = {"content-type": content_type, "cache-control": "no-cache", "transfer-encoding": "chunked"}
        self._add(h11.Response(status_code=200, headers=list(head.items())))

    def add(self, data: bytes) -> None:
        """Add to an answer that has begun; `flush` or `end` sends it."""
        self._add(h11.Data(data=data))

    async def end(self) -> None:
        """End an answer, and send what is not sent yet.

        Raises:
            ConnectionError: The program has closed the connection.
        """
        self._add(h11.EndOfMessage())
        await self.flush()

    async def flush(self) -> None:
        """Send what was added, in one piece.

        Raises:
            ConnectionError: The program has closed the connection.
        """
        if self.gone:
            raise ConnectionAbortedError("the program has closed the connection")
        data, self._unsent = bytes(self._unsent), bytearray()
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()

    def _add(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._unsent += data
