"""The base of the services: JSON over HTTP on one port, a bearer token, `/health`.

    service = JsonService(token, health=lambda: {"open": 3})
    service.add("POST", "/episodes", open_episode)                  # async (Call) -> Answer
    address = await server_of_loop().listen("127.0.0.1", 0, service)

The port is that of the model endpoint (`engine.agents.server`): a request that no route takes goes to it. A handler that raises
`ServiceError` is answered with its status; the error has the form `{"error": {"message", "code"}}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import structlog

from engine.errors import EngineError
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.agents.connection import Connection, HttpRequest

log = structlog.get_logger(__name__)


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
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a route."""

    value: Mapping[str, Any]
    """Its body; empty where it has none."""
    token: str
    """Its bearer token; empty where it has none."""
    host: str
    """The address that it was sent to, `host:port`; empty where it does not say it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The parts of the path that the route names."""
    accept: str = ""
    """The media types that its sender reads."""

    def only(self, *known: str) -> None:
        """Refuse keys of the body that are not known. Raises: ServiceError."""
        other = next((key for key in self.value if key not in known), None)
        if other is not None:
            keys = ", ".join(f"`{key}`" for key in known) or "none"
            raise ServiceError(400, f"unknown key `{other[:80]}`; known keys: {keys}", "unknown_key")


class Answer(NamedTuple):
    """The answer of a route."""

    value: Any
    """JSON."""
    status: int = 200


class Stream(NamedTuple):
    """The answer of a route that is sent in parts. A part is taken when the parts before it are sent, so a slow reader slows it down."""

    content_type: str
    parts: AsyncGenerator[bytes, None]
    """Closed when the reader has gone."""


Handler = Callable[[Call], Awaitable[Answer | Stream]]


class _Route(NamedTuple):
    method: str
    pattern: re.Pattern[str]
    handler: Handler


class JsonService:
    """Routes of one service. See `engine.agents.server.Router`.

    Args:
        token: The bearer token of the service.
        health: What `GET /health` answers besides `status`; it needs no token.
        max_body: Maximum bytes of a request's body.
    """

    def __init__(self, token: str, health: Callable[[], Mapping[str, Any]], max_body: int | None = None) -> None:
        self._token = token
        self._max_body = max_body
        self._health = health
        self._routes: list[_Route] = []
        self.add("GET", "/health", self._healthy)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Add a route. `{name}` in the path is one part of it, which may have escaped slashes (`%2F`)."""
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        self._routes.append(_Route(method, re.compile(pattern), handler))

    def require(self, call: Call, *others: str | None) -> None:
        """Refuse a request whose token is neither the service's nor one of some others.

        Raises:
            ServiceError: Status 401.
        """
        if not any(
            hmac.compare_digest(call.token.encode(), item.encode()) for item in (self._token, *filter(None, others))
        ):
            raise ServiceError(401, "send `Authorization: Bearer TOKEN` with the token of this service", "bad_token")

    async def answer(self, request: HttpRequest, connection: Connection) -> bool:
        """Answer a request. Returns False, and sends nothing, if no route has its path."""
        matches = [(route, found) for route in self._routes if (found := route.pattern.fullmatch(request.path))]
        if not matches:
            return False
        try:
            chosen = next(((route, found) for route, found in matches if route.method == request.method), None)
            if chosen is None:
                methods = " and ".join(route.method for route, _ in matches)
                raise ServiceError(405, f"{request.path} takes {methods}", "bad_method")
            route, found = chosen
            names = {name: unquote(part) for name, part in found.groupdict().items()}
            if self._max_body is not None and len(request.body) > self._max_body:
                raise ServiceError(413, f"the body is larger than {self._max_body} bytes", "too_large")
            headers = request.headers
            call = Call(_body(request), _token(request), headers.get("host", ""), names, headers.get("accept", ""))
            made = await route.handler(call)
        except ServiceError as error:
            retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
            value = {"error": {"message": error.message, "code": error.code}}
            await connection.json(error.status, value, retry)
        except EngineError as error:
            await connection.json(500, {"error": {"message": words_of(error), "code": error.kind}})
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("a request to the service failed", path=request.path)
            await connection.json(500, {"error": {"message": words_of(error), "code": "engine_error"}})
        else:
            if isinstance(made, Stream):
                await _send(made, connection)
            else:
                await connection.json(made.status, made.value)
        return True

    async def _healthy(self, call: Call) -> Answer:
        return Answer({"status": "ok", **self._health()})


async def _send(stream: Stream, connection: Connection) -> None:
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
        log.exception("a stream of the service failed")
        raise ConnectionAbortedError("the stream failed") from error
    finally:
        await parts.aclose()


def _body(request: HttpRequest) -> Mapping[str, Any]:
    if not request.body.strip():
        return {}
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError):
        raise ServiceError(400, "the body is not JSON", "bad_body") from None
    if not isinstance(value, dict):
        raise ServiceError(400, "the body is not a JSON object", "bad_body")
    return value


def _token(request: HttpRequest) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
