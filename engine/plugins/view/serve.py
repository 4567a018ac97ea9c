"""Runs the web app on a free port of 127.0.0.1 until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import structlog
import uvicorn

from engine.errors import EngineError, StoreError
from engine.plugins.view.documents import Documents
from engine.plugins.view.web import make_app, new_token

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing

log = structlog.get_logger(__name__)

_PATIENCE = 20.0
"""Seconds to wait for the first page before the tokenizer is loaded."""


def bind(port: int) -> socket.socket:
    """Return a socket on a port of 127.0.0.1; 0: a free one.

    Raises:
        StoreError: the port is in use, or not allowed.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        raise StoreError(f"port {port} of 127.0.0.1: {error.strerror}; leave out --port to use a free one") from error
    return found


def serve(listing: Listing, port: int, ready: Callable[[str], None]) -> None:
    """Show a list of episodes until the process is interrupted.

    Args:
        listing: The episodes.
        port: The port; 0: a free one.
        ready: Called with the address, once requests are accepted.

    Raises:
        StoreError: the port cannot be used.
    """
    place, token = bind(port), new_token()
    address = f"http://127.0.0.1:{place.getsockname()[1]}/?token={token}"
    documents = Documents(listing)
    config = uvicorn.Config(
        make_app(documents, token), log_level="warning", access_log=False, lifespan="off", server_header=False
    )
    server = _Server(config, lambda: ready(address))
    Thread(target=_prepare, args=(documents,), name="view-prepare", daemon=True).start()
    with place, suppress(KeyboardInterrupt):
        server.run(sockets=[place])


class _Server(uvicorn.Server):
    """Says when requests are accepted."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def _prepare(documents: Documents) -> None:
    """Read what first filters and first tokens need. A problem is only logged: the page that needs it says it too."""
    try:
        documents.prepare(_PATIENCE)
    except EngineError as error:
        log.warning("the index of episodes could not be filled", error=str(error))
