"""HTTP/1.1 connections: requests one after the other, whether the other side still reads its answers, and which
connections a server keeps.

Invariant: a request is its head until a route has checked its key and asks for the body. What cannot be read as HTTP
gets an answer too.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import h11
import structlog

from engine.logs import Seldom
from engine.plugins.agents.wire.requests import ApiError
from engine.schemas.base import Struct
from engine.storable import valid_text

log = Seldom(structlog.get_logger(__name__))

HEAD_SECONDS, BODY_SECONDS = 20, 120
"""Time for the head of a request and for its body. A connection whose key is known may wait longer before a request
begins."""
MAX_WITHOUT_KEY, MAX_OF_PEER, MAX_OF_KEY = 512, 128, 256
"""Connections that have sent no known key: of all peers, and of one address or socket file. Connections of one key."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of the requests of one key that are not answered yet."""
_DESCRIPTORS = 1 << 16
"""Limit of file descriptors that is asked of the system. Programs inherit it, and some loop over all descriptors."""

MAX_BODY = 64 << 20
"""Maximum bytes of a request's body."""
MAX_VALUES = 250_000
"""Maximum number of commas, colons and brackets of a JSON body: reading it holds the event loop for about 50 ms."""
_READ = 1 << 16
"""Maximum bytes of a head, and of what is read at once."""
_ANSWERABLE = (h11.IDLE, h11.SEND_RESPONSE)
_READ_WHOLE = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]  # h11 does not list the second one


class RequestHead(Struct, frozen=True, kw_only=True):
    """A request without its body."""

    method: str
    path: str
    """Without a query and a slash at its end."""
    headers: Mapping[str, str]
    """By name in lower case."""

    @property
    def key(self) -> str:
        """The bearer token, or the header `x-api-key`; empty if it has neither."""
        kind, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else self.headers.get("x-api-key", "")


class ProgramConnection:
    """One connection.

    An answer counts as received when its last byte was sent to a program that had not closed the connection, and the
    program's system took it: a program that closes with unread bytes resets the connection, and the next `head` raises
    ConnectionError.

    Args:
        reader: What the program sends.
        writer: What it gets.
        admission: The connections of its server.
        peer: The address or socket file that it came from.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admission: Admission, peer: str
    ) -> None:
        self._reader, self._writer, self.admission, self.peer = reader, writer, admission, peer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ)
        self._head: RequestHead | None = None
        self._reading: asyncio.Task[bytes] | None = None
        """A read that began while an answer was awaited."""
        self._unsent = bytearray()
        self.gone = False
        """Whether the program has closed the connection."""
        self.key: str | None = None
        """The known key that it sent."""
        self.waits = True
        """Whether it waits for a request."""
        self.patience: int | None = HEAD_SECONDS
        """Seconds that are left to what is awaited; None: no limit."""
        self.held = 0
        """Bytes of the body of its request."""

    # --- requests -----------------------------------------------------------------------------------------

    async def head(self) -> RequestHead | None:
        """Wait for the next request; None if the program has closed the connection.

        Raises:
            ConnectionError: The connection was reset, so the program did not get all of the newest answer.
            ApiError: What came is not HTTP; `json` sends the error and ends the connection.
        """
        http, self._head, self.held, self.waits = self._http, None, 0, True
        if http.our_state is h11.MUST_CLOSE:
            self.patience = HEAD_SECONDS
            try:
                self._writer.write_eof()
            except OSError as error:
                raise ConnectionAbortedError("the connection was reset") from error
            while await self._more():  # the program closes the connection, or resets it
                pass
            return None
        if http.our_state is h11.DONE:
            http.start_next_cycle()
            if http.trailing_data[0]:  # many small requests at once must not hold the loop
                await asyncio.sleep(0)
        if self.key is None:
            self.patience = HEAD_SECONDS
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        path = head.target.decode("latin-1").partition("?")[0].rstrip("/")
        if head.http_version not in (b"1.0", b"1.1"):
            raise ApiError("this server speaks HTTP/1.1", status=505, code="bad_http")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError("a request has `Content-Length` or `Transfer-Encoding`, not both", code="bad_http")
        self._head = RequestHead(method=head.method.decode(), path=path, headers=headers)
        return self._head

    async def body(self, most: int = MAX_BODY) -> bytes:
        """The body of the request.

        Args:
            most: Maximum number of bytes.

        Raises:
            ApiError: It is larger, or what came is not HTTP.
            ConnectionError: The connection was reset.
        """
        assert self._head is not None
        self.patience, self.waits, data = BODY_SECONDS, True, bytearray()
        if int(self._head.headers.get("content-length", 0)) <= most:
            if self._http.they_are_waiting_for_100_continue:
                self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            while isinstance(event := await self._event(), h11.Data) and len(data) + len(event.data) <= most:
                data += event.data
                self.admission.hold(self, len(event.data))
            if isinstance(event, h11.EndOfMessage):
                self.patience, self.waits = None, False
                return bytes(data)
        raise ApiError(f"the body is larger than {most} bytes", status=413, code="too_large")

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                text = f"this is not HTTP/1.1: {valid_text(str(error), 200)}"
                raise ApiError(text, status=error.error_status_hint, code="bad_http") from None
            if event is not h11.NEED_DATA:
                return event
            data = await self._more()
            if self.patience is None:
                self.patience = HEAD_SECONDS
            self._http.receive_data(data)

    async def _more(self) -> bytes:
        reading, self._reading = self._reading, None
        return await (reading or self._reader.read(_READ))

    async def until(self, answer: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until an answer is known, the program has closed the connection (`gone`), or some time has passed."""
        if self.gone:
            return
        waited: list[asyncio.Future[Any]] = [answer]
        if len(self._http.trailing_data[0]) < _READ:  # what follows the request waits, and is not read without end
            self._reading = self._reading or asyncio.ensure_future(self._reader.read(_READ))
            waited.append(self._reading)
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        data = b"" if reading.exception() is not None else reading.result()
        self.gone = not data
        if data:
            self._http.receive_data(data)

    # --- answers ------------------------------------------------------------------------------------------

    async def json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer. The connection ends with it if the request was not read to its end.

        Raises:
            ConnectionError: The program has closed the connection.
        """
        self._add_json(status, value, headers or {})
        await self.flush()

    def _add_json(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
        if self._http.our_state not in _ANSWERABLE:
            raise ConnectionAbortedError("an answer has begun")
        data = json.dumps(value).encode()
        head = {"content-type": "application/json", "content-length": str(len(data)), **headers}
        if not self._is_read():
            head["connection"] = "close"
        self._add(h11.Response(status_code=status, headers=list(head.items())))
        if self._head is None or self._head.method != "HEAD":
            self._add(h11.Data(data=data))
        self._add(h11.EndOfMessage())

    def _is_read(self) -> bool:
        """Whether all of the request has come; what has come of a body that nobody wants is left out."""
        if self._head is None:
            return False
        try:
            while self._http.their_state is h11.SEND_BODY and self._http.next_event() is not h11.NEED_DATA:
                pass
        except h11.RemoteProtocolError:
            return False
        return self._http.their_state in _READ_WHOLE

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

    def _add(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._unsent += data

    # --- the end ------------------------------------------------------------------------------------------

    def time_out(self) -> None:
        """Close the connection; a request that has begun gets status 408."""
        begun = self._http.their_state is h11.SEND_BODY or self._http.trailing_data[0]
        if begun and self._http.our_state in _ANSWERABLE and not self.gone:
            error = {"message": "the request took too long to come", "type": "invalid_request_error", "code": "timeout"}
            self._add_json(408, {"error": error}, {})
            self._writer.write(bytes(self._unsent))
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()  # a program that does not read would hold it
        self._writer.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


class Admission:
    """Which connections a server keeps: how many, for how long without a request, and with how many bytes that wait for
    answers.

    A connection counts for its peer until it has sent a key that is known, and from then on for that key. Where one has
    too many, its own oldest connection that waits for a request is closed; so nobody takes the places of others. Time
    is counted in ticks of the event loop, at most one a second: a time in which the engine itself was busy does not
    count.
    """

    def __init__(self) -> None:
        self._peers: dict[str, dict[ProgramConnection, None]] = {}
        """The connections without a known key, by peer, oldest first."""
        self._keys: dict[str, dict[ProgramConnection, None]] = {}
        """The others, by key."""
        self._timer: asyncio.TimerHandle | None = None
        self._most = raise_descriptors() // 2

    def add(self, connection: ProgramConnection) -> None:
        """Take a new connection."""
        if len(self._peers.get(connection.peer, ())) >= MAX_OF_PEER:
            self._close_oldest(self._peers[connection.peer])
        elif sum(map(len, self._peers.values())) >= MAX_WITHOUT_KEY:
            most_connected = max(self._peers.values(), key=len)
            self._close_oldest(most_connected)
        elif sum(map(len, (*self._peers.values(), *self._keys.values()))) >= self._most:
            self.make_room()
        self._peers.setdefault(connection.peer, {})[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self.tick)

    def remove(self, connection: ProgramConnection) -> None:
        """Forget a connection; a second call does nothing."""
        groups, name = (self._peers, connection.peer) if connection.key is None else (self._keys, connection.key)
        group = groups.get(name, {})
        group.pop(connection, None)
        if not group:
            groups.pop(name, None)

    def claim(self, connection: ProgramConnection, key: str) -> None:
        """Note that a request with a known key has begun.

        Raises:
            ApiError: The key has too many connections, and all of them wait for answers.
        """
        if connection.key != key:
            others = self._keys.get(key, {})
            if len(others) >= MAX_OF_KEY and not self._close_oldest(others):
                text = f"{MAX_OF_KEY} requests with this key wait for their answers: send fewer at a time"
                raise ApiError(text, status=429, code="too_many_connections")
            self.remove(connection)
            connection.key = key
            self._keys.setdefault(key, {})[connection] = None
        connection.patience, connection.waits = None, False

    def forget_key(self, key: str) -> None:
        """Note that a key is not known any more. Its connections have some time to get their answers."""
        for connection in [*self._keys.get(key, ())]:
            self.remove(connection)
            connection.key, connection.patience = None, BODY_SECONDS
            self._peers.setdefault(connection.peer, {})[connection] = None

    def hold(self, connection: ProgramConnection, count: int) -> None:
        """Note bytes of a connection's request, which count until its answer.

        Raises:
            ApiError: Too many bytes of its key wait for answers.
        """
        connection.held += count
        if connection.held <= MAX_WAITING_BYTES // MAX_OF_KEY or connection.key is None:
            return
        if sum(other.held for other in self._keys[connection.key]) > MAX_WAITING_BYTES:
            text = f"more than {MAX_WAITING_BYTES >> 20} MiB with this key wait for their answers: send fewer at a time"
            raise ApiError(text, status=429, code="too_many_bytes")

    def make_room(self) -> bool:
        """Close the oldest connection that waits for a request, of the peer or key that has most; False if there is
        none."""
        groups = [*self._peers.values(), *self._keys.values()]
        return any(self._close_oldest(group) for group in sorted(groups, key=len, reverse=True))

    def tick(self) -> None:
        """Count a second, and close the connections whose time has passed."""
        everyone = [connection for group in (*self._peers.values(), *self._keys.values()) for connection in group]
        self._timer = asyncio.get_running_loop().call_later(1.0, self.tick) if everyone else None
        for connection in everyone:
            if connection.patience is not None:
                connection.patience -= 1
                if connection.patience <= 0:
                    log.warning("a request took too long to come", peer=connection.peer)
                    self.remove(connection)
                    connection.time_out()

    def close(self) -> None:
        """Count no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_oldest(self, group: Iterable[ProgramConnection]) -> bool:
        """Close the oldest connection of a group that waits for a request, or has no known key; False if there is
        none."""
        oldest = next((connection for connection in group if connection.waits or connection.key is None), None)
        if oldest is not None:
            log.warning("too many connections: the oldest one without a request is closed", peer=oldest.peer)
            self.remove(oldest)
            oldest.abort()
        return oldest is not None


def raise_descriptors() -> int:
    """Raise this process's limit of file descriptors as far as the system lets it. Returns the limit."""
    soft, hard = (
        _DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = min(hard, _DESCRIPTORS)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return wanted
    return soft


def read_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        ApiError: It is not JSON, or has too many values; the message says where.
    """
    if len(body) > MAX_VALUES and sum(map(body.count, (b",", b":", b"[", b"{"))) > MAX_VALUES:
        raise ApiError(f"the body has more than {MAX_VALUES} commas, colons and brackets")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {valid_text(str(error), 200)}") from None
