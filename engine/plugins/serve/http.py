"""The base of the services: JSON over HTTP on one port, a bearer token, `/health`.

    service = JsonService(token, health=lambda: {"open": 3})
    service.add("POST", "/episodes", open_episode)                  # async (Call) -> Answer; needs the token
    address = await server_of_loop().listen("127.0.0.1", 0, service.answer)

The port is that of the model endpoint (`engine.plugins.agents.server`): a request that no route takes goes to it. A
handler that raises `ServiceError` is answered with its status; the error has the form `{"error": {"message", "code"}}`.
The token is
checked from the head: before it, no body is read, and no answer depends on what the service holds.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
import structlog

from engine.errors import EngineError
from engine.logs import Seldom
from engine.plugins.agents.connection import read_json
from engine.plugins.agents.wire.requests import ApiError
from engine.schemas.base import Struct
from engine.storable import refusal, valid_text, words_of
from engine.terminal import brief

if TYPE_CHECKING:
    from engine.plugins.agents.connection import ProgramConnection, RequestHead

log = Seldom(structlog.get_logger(__name__))

MAX_BODY = 1 << 20
"""Maximum bytes of a request's body."""


class ServiceError(Exception):
    """A request that is answered with an error.

    Args:
        status: The HTTP status.
        message: What is wrong and how to fix it.
        code: A name for programs.
        retry_after: Seconds after which the same request may succeed.
    """

    def __init__(self, status: int, message: str, code: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, brief(message), code, retry_after


class RouteCall(Struct, frozen=True):
    """One request to a route."""

    value: Mapping[str, Any]
    """Its body; empty where it has none."""
    host: str
    """The address that it was sent to, `host:port`; empty where it does not say it."""
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The parts of the path that the route names."""
    accept: str = ""
    """The media types that its sender reads."""

    def only(self, *keys: str) -> None:
        """Refuse other keys of the body. Raises: ServiceError."""
        other = next((key for key in self.value if key not in keys), None)
        if other is not None:
            names = ", ".join(f"`{key}`" for key in keys) or "none"
            raise ServiceError(400, f"unknown key `{other[:80]}`; known keys: {names}", "unknown_key")


class RouteAnswer(Struct, frozen=True):
    """The answer of a route."""

    value: Any
    """JSON."""
    status: int = 200


class Stream(Struct, frozen=True):
    """The answer of a route that is sent in parts. A part is taken when the parts before it are sent, so a slow reader
    slows it down."""

    content_type: str
    parts: AsyncGenerator[bytes, None]
    """Closed when the reader has gone."""


Handler = Callable[[RouteCall], Awaitable[RouteAnswer | Stream]]
Keys = Callable[[Mapping[str, str]], str | None]
"""A key that a route takes besides the service's token, by the parts of its path."""


class _Route(Struct, frozen=True):
    method: str
    pattern: re.Pattern[str]
    handler: Handler
    keys: Keys | None
    public: bool


class JsonService:
    """Routes of one service. `answer` is an `engine.plugins.agents.server.Router`.

    Args:
        token: The bearer token of the service.
        health: What `GET /health` answers besides `status`; it needs no token.
    """

    def __init__(self, token: str, health: Callable[[], Mapping[str, Any]]) -> None:
        self._token = token
        self._health = health
        self._routes: list[_Route] = []
        self.add("GET", "/health", self._healthy, public=True)

    def add(self, method: str, path: str, handler: Handler, keys: Keys | None = None, *, public: bool = False) -> None:
        """Add a route, which needs the token.

        Args:
            method: Its method.
            path: Its path. `{name}` is one part, which may have escaped slashes (`%2F`).
            handler: Answers it.
            keys: A key that it takes too.
            public: Whether it needs no token; it reads no body then.
        """
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        self._routes.append(_Route(method, re.compile(pattern), handler, keys, public))

    async def answer(self, head: RequestHead, connection: ProgramConnection) -> bool:
        """Answer a request. Returns False, and reads and sends nothing, if no route has its path."""
        matches = [(route, found) for route in self._routes if (found := route.pattern.fullmatch(head.path))]
        if not matches:
            return False
        try:
            made = await self._made(matches, head, connection)
        except (ServiceError, ApiError) as error:
            retry = getattr(error, "retry_after", None)
            value = {"error": {"message": error.message, "code": error.code}}
            await connection.json(error.status, value, {} if retry is None else {"retry-after": str(retry)})
        except EngineError as error:
            await connection.json(500, {"error": {"message": words_of(error), "code": error.kind}})
        except ConnectionError:
            raise
        except Exception as error:
            log.warning("a request to the service failed", path=valid_text(head.path, 200), exc_info=True)
            await connection.json(500, {"error": {"message": words_of(error), "code": "engine_error"}})
        else:
            if isinstance(made, Stream):
                await self._send(made, connection)
            else:
                await connection.json(made.status, made.value)
        return True

    async def _made(
        self, matches: Sequence[tuple[_Route, re.Match[str]]], head: RequestHead, connection: ProgramConnection
    ) -> RouteAnswer | Stream:
        """Check the token, read the body, and call the route.

        Raises:
            ServiceError: The request is refused.
            ApiError: It is not HTTP, or is too large.
        """
        method = "GET" if head.method == "HEAD" else head.method
        route, found = next((each for each in matches if each[0].method == method), matches[0])
        names = {name: unquote(part) for name, part in found.groupdict().items()}
        value: Mapping[str, Any] = {}
        if not route.public:
            key = route.keys(names) if route.keys is not None else None
            if not any(hmac.compare_digest(head.key.encode(), each.encode()) for each in (self._token, key) if each):
                text = "send `Authorization: Bearer TOKEN` with the token of this service"
                raise ServiceError(401, text, "bad_token")
            connection.admission.claim(connection, head.key)
        if route.method != method:
            methods = " and ".join(each.method for each, _ in matches)
            raise ServiceError(405, f"{valid_text(head.path, 200)} takes {methods}", "bad_method")
        if not route.public:
            body = await connection.body(MAX_BODY)
            try:
                value = read_json(body) if body.strip() else {}
            except ApiError as error:
                raise ServiceError(400, str(error), "bad_body") from None
            if not isinstance(value, dict):
                raise ServiceError(400, "the body is not a JSON object", "bad_body")
            if (why := refusal(value)) is not None:
                raise ServiceError(400, f"the body: {valid_text(why, 300)}", "bad_body")
        headers = head.headers
        return await route.handler(RouteCall(value, headers.get("host", ""), names, headers.get("accept", "")))

    async def _healthy(self, call: RouteCall) -> RouteAnswer:
        return RouteAnswer({"status": "ok", **self._health()})

    async def _send(self, stream: Stream, connection: ProgramConnection) -> None:
        """Send a stream part by part, and close it when its reader has gone.

        Raises:
            ConnectionError: The reader has gone, or a part could not be made: the answer has no end then.
        """
        parts = stream.parts
        try:
            connection.begin(stream.content_type)
            await connection.flush()
            while True:
                following = asyncio.ensure_future(anext(parts, None))
                try:
                    while not following.done():
                        await connection.until(following)
                        if connection.gone:
                            raise ConnectionAbortedError("the reader has closed the connection")
                finally:
                    if not following.done():
                        following.cancel()
                        await asyncio.wait([following])
                part = following.result()
                if part is None:
                    break
                connection.add(part)
                await connection.flush()
            await connection.end()
        except ConnectionError:
            raise
        except Exception as error:
            log.warning("a stream of the service failed", exc_info=True)
            raise ConnectionAbortedError("the stream failed") from error
        finally:
            await parts.aclose()
