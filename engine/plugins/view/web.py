"""The web app of `engine view`: pages and documents over HTTP, on a free port of the loopback interface alone, until it
is interrupted.

Invariants:
- Every request needs the token: once in the address, then in a cookie that no script can read, or in the header
  `Authorization`.
- A request whose `Host` is not a name of the loopback interface is refused, so a foreign page cannot reach the app by
  DNS rebinding.
- Answers forbid inline scripts, foreign scripts and frames (Content-Security-Policy). All requests are
  GET but that which stores a review; it must be JSON, which no form of a foreign page can send.
- Port and token are the same at the next start, so links to episodes and the browser's cookie last: the port follows
  from the folder of runs, and the token is in a file that only its owner can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from zlib import crc32

import orjson
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.errors import EngineError, StoreError
from engine.plugins.view import assets
from engine.plugins.view.documents import Documents
from engine.store.private import whole_file
from engine.tokens.catalogue import cache_root

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


log = structlog.get_logger(__name__)

_YEAR = 365 * 24 * 3600
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""Allows an empty element `style`, to which the chart library adds its rules."""
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {_EMPTY_STYLE}; img-src 'self' data:; connect-src "
    "'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_OWN = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site` of requests that no other site made."""
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


def make_app(documents: Documents, token: str) -> ASGIApp:
    """Return the ASGI app.

    Args:
        documents: What it shows.
        token: The token that every request needs.
    """
    app = Starlette(
        routes=[
            Route("/", _static),
            Route("/static/{name}", _static),
            Route("/api/image", partial(_image, documents)),
            Route("/api/rows", partial(_rows, documents)),
            Route("/api/review", partial(_review, documents), methods=["POST"]),
            Route("/api/{name}", partial(_document, documents)),
        ],
    )
    return Gate(app, token)


class Gate:
    """Refuses requests without the token or with a foreign `Host`, and adds the headers of `HEADERS` to every
    answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that does not reach the app; None if it does."""
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOOPBACK:
            return _text("This address is not allowed: open the app at 127.0.0.1 or localhost.", 403)
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._right(given):
            entered = RedirectResponse("/", 303)
            entered.set_cookie(_cookie(host), given, max_age=_YEAR, httponly=True, samesite="lax")
            return entered
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        allowed = self._right(request.cookies.get(_cookie(host), "")) or (
            scheme.lower() == "bearer" and self._right(bearer)
        )
        if not allowed:
            return _text(
                "Open the address that `engine view` printed: it holds the token, which the browser keeps.", 403
            )
        if request.url.path.startswith("/api/") and request.headers.get("sec-fetch-site", "none") not in _OWN:
            return _text("Only the pages of this app may ask for documents.", 403)
        stores = request.url.path == "/api/review" and request.headers.get("content-type") == "application/json"
        if request.method not in ("GET", "HEAD") and not (stores and request.method == "POST"):
            return _text("Only GET is answered, and a review as JSON.", 405)
        return None

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)


def _cookie(host: str) -> str:
    """Return the name of the cookie. Cookies are shared by all ports of a host, so the port is part of the name."""
    port = host.rpartition(":")[2]
    return f"engine_view_{port if port.isdigit() else 80}"


def _text(text: str, status: int) -> Response:
    return Response(text + "\n", status, media_type="text/plain; charset=utf-8")


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


async def _static(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name == "plotly.js":
        library = assets.chart_library()
        if library is None:
            return _text("The chart library is not installed: pip install 'episode-engine[view]'", 404)
        return Response(library, media_type=assets.TYPES["js"])
    found = assets.read(name)
    if found is None:
        return _text("There is no such file.", 404)
    return Response(found, media_type=assets.TYPES[name.rpartition(".")[2]])


async def _document(documents: Documents, request: Request) -> Response:
    try:
        found = await run_in_threadpool(documents.answer, request.path_params["name"], dict(request.query_params))
        return _json(found)
    except EngineError as error:
        return _json({"error": str(error)}, 404)
    except Exception as error:  # one request must not end the app  # noqa: BLE001
        log.warning("a document could not be made", name=request.path_params["name"], error=repr(error))
        return _json({"error": f"this is a defect of the viewer: {error!r}"}, 500)


async def _review(documents: Documents, request: Request) -> Response:
    try:
        return _json(await run_in_threadpool(documents.review, orjson.loads(await request.body())))
    except (EngineError, ValueError) as error:
        return _json({"error": str(error)}, 400)


async def _rows(documents: Documents, request: Request) -> Response:
    query = request.query_params
    try:
        lines = await run_in_threadpool(documents.rows, *(query.get(name, "") for name in ("within", "filter", "text")))
    except EngineError as error:
        return _json({"error": str(error)}, 404)
    named = {"content-disposition": 'attachment; filename="rows.jsonl"'}
    return StreamingResponse(lines, headers=named, media_type="application/x-ndjson")


async def _image(documents: Documents, request: Request) -> Response:
    try:
        found = await run_in_threadpool(
            documents.image, request.query_params.get("run", ""), request.query_params.get("digest", "")
        )
    except EngineError as error:
        return _text(str(error), 404)
    return Response(found.data, media_type=found.mime)


_PATIENCE = 20.0
"""Seconds to wait for the first page before the tokenizer is loaded."""


def serve(documents: Documents, place: socket.socket, token: str, ready: Callable[[str], None]) -> None:
    """Show documents until the process is interrupted.

    Args:
        documents: What is shown.
        place: The socket, from `open_place`, and `token` what every request needs.
        ready: Called with the address, which takes requests.
    """
    address = f"http://127.0.0.1:{place.getsockname()[1]}/?token={token}"
    config = uvicorn.Config(
        make_app(documents, token), log_level="warning", access_log=False, lifespan="off", server_header=False
    )
    Thread(target=_prepare, args=(documents,), name="view-prepare", daemon=True).start()
    with place, suppress(KeyboardInterrupt):
        ready(address)  # the socket listens: requests wait for the server
        uvicorn.Server(config).run(sockets=[place])


def _prepare(documents: Documents) -> None:
    """Read what first filters and first tokens need. A problem is only logged: the page that needs it says it too."""
    try:
        documents.prepare(_PATIENCE)
    except EngineError as error:
        log.warning("the index of episodes could not be filled", error=str(error))


_PORTS = range(20_000, 30_000)
"""Below those that the system gives to programs that ask for a free one."""
_LENGTH = 32
"""Characters of a token."""


def open_place(port: int | None, out: Path) -> socket.socket:
    """Return a socket of 127.0.0.1 on a port; None: that of the folder of runs, or a free one if it is in use.

    Raises:
        StoreError: the port is in use, or not allowed.
    """
    if port is None:
        with suppress(StoreError):
            return bind(_PORTS[crc32(str(out.resolve()).encode()) % len(_PORTS)])
    return bind(port or 0)


def bind(port: int) -> socket.socket:
    """Return a socket on a port of 127.0.0.1; 0: a free one.

    Raises:
        StoreError: the port is in use, or not allowed.
    """
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(("127.0.0.1", port))
        place.listen()
    except OSError as error:
        place.close()
        raise StoreError(f"port {port} of 127.0.0.1: {error.strerror}; leave out --port to use a free one") from error
    return place


def new_token() -> str:
    """Return a token that nobody has used."""
    return secrets.token_urlsafe(_LENGTH * 3 // 4)


def stored_token() -> str:
    """Return the token of earlier starts, from the file `view-token` of the cache, or a new one. It is used only if
    nobody else can read the file."""
    file = cache_root() / "view-token"
    with suppress(OSError):
        state = file.stat()
        token = file.read_text(encoding="utf-8").strip()
        if state.st_uid == os.getuid() and not state.st_mode & 0o077 and len(token) >= _LENGTH:
            return token
    token = new_token()
    with suppress(StoreError), whole_file(file) as draft:  # without a cache, it is new at each start
        draft.write_text(token, encoding="utf-8")
    return token
