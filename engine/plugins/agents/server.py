"""The endpoint that agent programs call: one HTTP/1.1 server on each event loop, for all its episodes and the services
on it.

A request's key says to which episode it belongs (`Authorization: Bearer`, or `x-api-key`). A request with an unknown
key is refused, so the key of an episode that has ended is worthless. The server listens on 127.0.0.1 only, while an
episode is open.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import h11
import structlog

from engine.logs import Seldom
from engine.plugins.agents import rewards
from engine.plugins.agents.connection import MAX_BODY, Admission, ProgramConnection, RequestHead, read_json
from engine.plugins.agents.wire.chat import ChatCompletions
from engine.plugins.agents.wire.messages import Messages
from engine.plugins.agents.wire.requests import ApiError, ModelApi, ModelRequest, Session
from engine.plugins.agents.wire.responses import Responses
from engine.storable import valid_text, words_of

if TYPE_CHECKING:
    from engine.plugins.agents.inbox import Exchange, Inbox

log = Seldom(structlog.get_logger(__name__))

_MOST_ENDED = 4096
"""Closed keys that are remembered, for the message of a late reward."""
KEEP_ALIVE_SECONDS = 3.0
"""A stream whose reply takes longer begins, and gets a comment each time as long passes."""

_MAX_REWARD = 1 << 16
"""Maximum bytes of a posted reward."""
_BURST = 8
"""Connections that are accepted before others are read. The requests of a well-behaved client are read before it has
many connections without one."""
_PAUSE = 0.1
"""Seconds after which connections are accepted again, where the system had no room for one and none could be closed."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REWARDS = (rewards.PATH, rewards.PATH.removeprefix("/v1"))

CHAT, MESSAGES = ChatCompletions(), Messages()
APIS: dict[str, ModelApi] = {api.path: api for api in (CHAT, Responses(), MESSAGES)}
"""By path."""
MODELS_PATH = "/v1/models"


Router = Callable[[RequestHead, ProgramConnection], Awaitable[bool]]
"""Answers a request to a service on the same port (`engine.plugins.serve.http.JsonService`); False: it has no such
route, and has read and sent nothing. Raises ApiError: the request is not HTTP, or has no place."""


class Listener:
    """Accepts the connections of one socket until `close`.

    Args:
        listening: The socket, which this closes.
        take: Called with each connection's socket and peer.
        admission: The connections of the server.
    """

    def __init__(
        self, listening: socket.socket, take: Callable[[socket.socket, str], None], admission: Admission
    ) -> None:
        self._socket, self._take, self._admission = listening, take, admission
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    @property
    def address(self) -> str:
        """Its address, without a path."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Stop; a second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the loop would call again at once
                log.warning("a connection could not be accepted", error=str(error))
                freed = error.errno in _FULL and self._admission.make_room()
                self._loop.remove_reader(self._socket)
                pause = 0.0 if freed else _PAUSE
                self._timer = self._loop.call_later(pause, self._loop.add_reader, self._socket, self._accept)
                return
            unix = self._socket.family == socket.AF_UNIX
            self._take(accepted, self._socket.getsockname() if unix else address[0])


class AgentServer:
    """The server of one event loop. Use `server_of_loop`."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._ended: dict[str, None] = {}
        """The newest keys that were closed."""
        self.admission = Admission()
        self._listener: Listener | None = None
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._router: Router | None = None

    async def listen(self, host: str, port: int, router: Router) -> str:
        """Listen on an address until `stop_listening`, also while no episode is open. Returns the address, without a
        path.

        Args:
            host: The address.
            port: The port; 0: a free one.
            router: Answers requests before the model APIs do.

        Raises:
            OSError: The address cannot be used.
        """
        async with self._opening:
            self._listener, self._router = self._listening(host, port), router
            return self._listener.address

    async def stop_listening(self) -> None:
        """End what `listen` began."""
        async with self._opening:
            self._router = None
            self._close()

    async def open(self, key: str, inbox: Inbox) -> str:
        """Take requests with a key. Returns the server's address, without a path."""
        async with self._opening:
            self._inboxes[key] = inbox
            self._listener = self._listener or self._listening("127.0.0.1", 0)
            return self._listener.address

    async def listen_on_file(self, path: Path) -> Listener:
        """Take the same requests on a socket file too. The caller closes the listener."""
        listening, folder = socket.socket(socket.AF_UNIX), os.open(path.parent, os.O_PATH)
        try:
            listening.bind(
                f"/proc/self/fd/{folder}/{path.name}"
            )  # an address has at most 108 bytes, a path may have more
            listening.listen(256)
        except OSError:
            listening.close()
            raise
        finally:
            os.close(folder)
        return Listener(listening, self._take, self.admission)

    async def close(self, key: str) -> None:
        """Refuse requests with a key from now on; without keys, stop to listen."""
        async with self._opening:
            if self._inboxes.pop(key, None) is not None:
                self._ended[key] = None
                self.admission.forget_key(key)
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            if not self._inboxes and self._router is None:
                self._close()

    def _listening(self, host: str, port: int) -> Listener:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return Listener(socket.create_server((host, port), family=family, backlog=1024), self._take, self.admission)

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.admission.close()
        for task in [*self._connections]:
            task.cancel()

    def _take(self, accepted: socket.socket, peer: str) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(accepted, peer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, accepted: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted)
        except (OSError, asyncio.CancelledError):
            accepted.close()
            return
        connection = ProgramConnection(
            reader, asyncio.StreamWriter(transport, protocol, reader, loop), self.admission, peer
        )
        self.admission.add(connection)
        try:
            await _Service(self._inboxes, self._ended, self._router, connection).run()
        except (ConnectionError, h11.ProtocolError, asyncio.CancelledError):
            pass  # the other side has gone, or the server stops
        finally:
            self.admission.remove(connection)
            with suppress(ConnectionError):
                connection.close()


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, AgentServer] = WeakKeyDictionary()


def server_of_loop() -> AgentServer:
    """The running loop's server."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = AgentServer()
    return _SERVERS[loop]


class _Service:
    """Answers the requests of one connection."""

    def __init__(
        self,
        inboxes: Mapping[str, Inbox],
        ended: Mapping[str, None],
        router: Router | None,
        connection: ProgramConnection,
    ) -> None:
        self._inboxes, self._ended, self._router = inboxes, ended, router
        self._connection = connection
        self._api: ModelApi = CHAT
        """The API of the current request."""
        self._newest: Exchange | None = None
        """The newest request that was answered."""

    async def run(self) -> None:
        """Answer requests until the connection ends."""
        while True:
            head: RequestHead | None = None
            try:
                head = await self._connection.head()
                if head is None:
                    return
                self._newest = None
                await self._answer(head)
            except ApiError as fault:
                if head is not None and head.key in self._inboxes:
                    self._inboxes[head.key].refused = fault.message
                await self._error(fault)
            except ConnectionError:
                if self._newest is not None:
                    self._newest.leave()
                raise
            except Exception as error:
                log.warning("a request failed with an error of the engine", exc_info=True)
                await self._error(ApiError(words_of(error), status=500, code="engine_error"))

    async def _answer(self, head: RequestHead) -> None:
        connection, method, path, headers = self._connection, head.method, head.path, head.headers
        if self._router is not None and await self._router(head, connection):
            return
        anthropic = MESSAGES.required_header in headers or path.startswith(MESSAGES.path)
        self._api = APIS.get(path, MESSAGES if anthropic else CHAT)
        key, needed = head.key, self._api.required_header
        inbox = self._inboxes.get(key)
        if inbox is None and key in self._ended and path in _REWARDS:
            raise ApiError("the episode is over", status=409, code="episode_over")
        if inbox is None:
            raise ApiError("the key belongs to no running episode", status=401, code="invalid_api_key")
        connection.admission.claim(connection, key)
        if method in ("GET", "HEAD") and (path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")):
            name = None if path == MODELS_PATH else unquote(path.removeprefix(f"{MODELS_PATH}/"))
            await connection.json(200, models(name, inbox.session, anthropic=anthropic))
        elif method == "POST" and path in _REWARDS:
            await connection.json(200, inbox.reward(read_json(await connection.body(_MAX_REWARD))))
        elif method != "POST" or path not in (*APIS, MESSAGES.count_path):
            served = f"GET {MODELS_PATH}, POST {', '.join(APIS)}, {MESSAGES.count_path} and {rewards.PATH}"
            shown = valid_text(f"{method} {path}", 200)
            raise ApiError(f"{shown} is not served; served are {served}", status=404, code="not_found")
        elif needed and needed not in headers:
            raise ApiError(f"the header `{needed}` is missing", param=needed)
        elif path == MESSAGES.count_path:
            counted = inbox.count(MESSAGES.counted(read_json(await connection.body(MAX_BODY)), inbox.session))
            await connection.json(200, {"input_tokens": counted})
        else:
            body = await connection.body(MAX_BODY)
            asked = self._api.read(read_json(body), inbox.session)
            exchange = inbox.ask(asked, path, body, headers)
            try:
                await (self._streamed if asked.stream else self._whole)(asked, exchange, self._api, inbox.session)
            except ConnectionError:
                exchange.leave()
                raise
            self._newest = exchange

    async def _whole(self, asked: ModelRequest, exchange: Exchange, api: ModelApi, session: Session) -> None:
        while not exchange.answer.done():
            await self._connection.until(exchange.answer)
            if self._connection.gone:
                raise ConnectionAbortedError("the program did not wait for its reply")
        await self._connection.json(200, api.whole(asked, exchange.answer.result(), session))

    async def _streamed(self, asked: ModelRequest, exchange: Exchange, api: ModelApi, session: Session) -> None:
        connection, answer, begun = self._connection, exchange.answer, False
        while not answer.done():
            await connection.until(answer, KEEP_ALIVE_SECONDS)
            if not answer.done():
                if not begun:
                    connection.begin()
                    begun = True
                connection.add(b": keep-alive\n\n")
                await connection.flush()
        if begun and (fault := answer.exception()) is not None:
            shown = fault if isinstance(fault, ApiError) else ApiError(str(fault), status=500)
            connection.add(api.fault_event(shown))
            await connection.end()
            return
        replies = answer.result()
        if not begun:
            connection.begin()
        for event in api.events(asked, replies, session):
            connection.add(event)
        await connection.end()

    async def _error(self, fault: ApiError) -> None:
        headers = {"retry-after": "1"} if fault.status == 429 else {"x-should-retry": "false"}
        await self._connection.json(fault.status, self._api.fault(fault), headers)


def models(name: str | None, session: Session, *, anthropic: bool) -> dict[str, Any]:
    """The model.

    Args:
        name: Its name; None: the list of the one model.
        session: Whose model it is.
        anthropic: Write it as Anthropic's API does.

    Raises:
        ApiError: the session's model has another name.
    """
    if name is not None and name != session.model:
        text = f"the model {name!r} does not exist; the only model is {session.model!r}"
        raise ApiError(text, param="model", status=404, code="model_not_found")
    id_ = session.model
    model: dict[str, Any] = {"id": id_, "object": "model", "created": 0, "owned_by": "episode"}
    around: dict[str, Any] = {"object": "list", "data": [model]}
    if anthropic:
        created = "1970-01-01T00:00:00Z"
        model = {"type": "model", "id": id_, "display_name": id_, "created_at": created, "lifecycle": "active"}
        around = {"data": [model], "first_id": id_, "last_id": id_, "has_more": False}
    return around if name is None else model
