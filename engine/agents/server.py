"""The endpoint that agent programs call: one HTTP/1.1 server on each event loop, for all its episodes.

A request's key says to which episode it belongs (`Authorization: Bearer`, or `x-api-key`). A request with an unknown key is
refused, so the key of an episode that has ended is worthless. The server listens on 127.0.0.1 only, while an episode is open.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import h11
import structlog

from engine.agents import rewards
from engine.agents.connection import MAX_BODY, Connection, HttpRequest, TooLargeError
from engine.agents.wire.api import ModelApi
from engine.agents.wire.models import MODELS_PATH, list_models, one_model
from engine.agents.wire.registry import APIS, CHAT, MESSAGES
from engine.agents.wire.requests import ApiError, ModelRequest, Session

if TYPE_CHECKING:
    from engine.agents.inbox import Exchange

log = structlog.get_logger(__name__)

_MOST_ENDED = 4096
"""Closed keys that are remembered, for the message of a late reward."""
KEEP_ALIVE_SECONDS = 3.0
"""A stream whose reply takes longer begins, and gets a comment each time as long passes."""

_REWARDS = (rewards.PATH, rewards.PATH.removeprefix("/v1"))


class Answerer(Protocol):
    """Answers the requests of one episode."""

    session: Session
    """What its requests are read with."""

    def ask(self, request: ModelRequest, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """Begin to answer a request, or find the one that it repeats; see `Inbox`.

        Raises:
            ApiError: It cannot be answered.
        """
        ...

    def count(self, request: ModelRequest) -> int:
        """Count the tokens of the prompt that a request leads to; it is not answered.

        Raises:
            ApiError: They cannot be counted.
        """
        ...

    def reward(self, body: Any) -> dict[str, Any]:
        """Take a reward for a reply; see `Inbox`.

        Raises:
            ApiError: It cannot be written.
        """
        ...


class Router(Protocol):
    """The routes of a service on the same port, such as `engine.serve.http.JsonService`."""

    async def answer(self, request: HttpRequest, connection: Connection) -> bool:
        """Answer a request; False: it has no such route, and has sent nothing."""
        ...


class AgentServer:
    """The server of one event loop. Use `server_of_loop`."""

    def __init__(self) -> None:
        self._answerers: dict[str, Answerer] = {}
        self._ended: dict[str, None] = {}
        """The newest keys that were closed."""
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._router: Router | None = None

    async def listen(self, host: str, port: int, router: Router) -> str:
        """Listen on an address until `stop_listening`, also while no episode is open. Returns the address, without a path.

        Args:
            host: The address.
            port: The port; 0: a free one.
            router: Answers requests before the model APIs do.

        Raises:
            OSError: The address cannot be used.
        """
        async with self._opening:
            self._server = await asyncio.start_server(self._serve, host, port, limit=1 << 20, backlog=1024)
            self._router = router
            return self._address()

    async def stop_listening(self) -> None:
        """End what `listen` began."""
        async with self._opening:
            self._router = None
            self._close()

    async def open(self, key: str, answerer: Answerer) -> str:
        """Take requests with a key. Returns the server's address, without a path."""
        async with self._opening:
            self._answerers[key] = answerer
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
            return self._address()

    async def listen_on_file(self, path: Path) -> asyncio.Server:
        """Take the same requests on a socket file too. The caller closes the server."""
        return await asyncio.start_unix_server(self._serve, path, limit=1 << 20, backlog=256)

    async def close(self, key: str) -> None:
        """Refuse requests with a key from now on; without keys, stop to listen."""
        async with self._opening:
            if self._answerers.pop(key, None) is not None:
                self._ended[key] = None
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            if not self._answerers and self._router is None:
                self._close()

    def _address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in [*self._connections]:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer)
        try:
            await _Service(self._answerers, self._ended, self._router, connection).run()
        except (ConnectionError, h11.ProtocolError, asyncio.CancelledError) as error:
            log.debug("a connection of an agent program ended", error=str(error))
        finally:
            self._connections.discard(task)
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
        answerers: Mapping[str, Answerer],
        ended: Mapping[str, None],
        router: Router | None,
        connection: Connection,
    ) -> None:
        self._answerers, self._ended, self._router = answerers, ended, router
        self._connection = connection
        self._api: ModelApi = CHAT
        """The API of the current request."""
        self._newest: Exchange | None = None
        """The newest request that was answered."""

    async def run(self) -> None:
        """Answer requests until the connection ends."""
        while True:
            try:
                request = await self._connection.request()
            except TooLargeError:
                await self._error(ApiError(f"the body is larger than {MAX_BODY >> 20} MiB", status=413))
                return
            except ConnectionError:
                if self._newest is not None:
                    self._newest.leave()
                raise
            if request is None:
                return
            self._newest = None
            try:
                await self._answer(request)
            except ApiError as fault:
                await self._error(fault)

    async def _answer(self, request: HttpRequest) -> None:
        method, path, headers = request.method, request.path, request.headers
        if self._router is not None and await self._router.answer(request, self._connection):
            return
        anthropic = MESSAGES.required_header in headers or path.startswith(MESSAGES.path)
        self._api = APIS.get(path, MESSAGES if anthropic else CHAT)
        key, needed = _key(headers), self._api.required_header
        answerer = self._answerers.get(key)
        if answerer is None and key in self._ended and path in _REWARDS:
            raise ApiError("the episode is over", status=409, code="episode_over")
        if answerer is None:
            raise ApiError("the key belongs to no running episode", status=401, code="invalid_api_key")
        if method == "GET" and path == MODELS_PATH:
            await self._connection.json(200, list_models(answerer.session, anthropic=anthropic))
        elif method == "GET" and path.startswith(f"{MODELS_PATH}/"):
            name = unquote(path.removeprefix(f"{MODELS_PATH}/"))
            await self._connection.json(200, one_model(name, answerer.session, anthropic=anthropic))
        elif method == "POST" and path in _REWARDS:
            await self._connection.json(200, answerer.reward(_json(request.body)))
        elif method != "POST" or path not in (*APIS, MESSAGES.count_path):
            served = f"GET {MODELS_PATH}, POST {', '.join(APIS)}, {MESSAGES.count_path} and {rewards.PATH}"
            raise ApiError(f"{method} {path} is not served; served are {served}", status=404, code="not_found")
        elif needed and needed not in headers:
            raise ApiError(f"the header `{needed}` is missing", param=needed)
        elif path == MESSAGES.count_path:
            counted = answerer.count(MESSAGES.counted(_json(request.body), answerer.session))
            await self._connection.json(200, {"input_tokens": counted})
        else:
            await self._reply(answerer, request)

    async def _reply(self, answerer: Answerer, request: HttpRequest) -> None:
        api, session = self._api, answerer.session
        asked = api.read(_json(request.body), session)
        exchange = answerer.ask(asked, request.path, request.body, request.headers)
        try:
            await (self._streamed if asked.stream else self._whole)(asked, exchange, api, session)
        except ConnectionError:
            exchange.leave()
            raise
        self._newest = exchange

    async def _whole(self, asked: ModelRequest, exchange: Exchange, api: ModelApi, session: Session) -> None:
        await self._connection.until(exchange.answer)
        if not exchange.answer.done():
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
            connection.add(api.fault_event(shown).written())
            await connection.end()
            return
        made = answer.result()
        if not begun:
            connection.begin()
        for event in api.events(asked, made, session):
            connection.add(event.written())
        await connection.end()

    async def _error(self, fault: ApiError) -> None:
        headers = {"x-should-retry": "false"}
        await self._connection.json(fault.status, self._api.fault(fault), headers)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None


def _key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def now() -> int:
    """The time for `created`, in whole seconds."""
    return int(time.time())
