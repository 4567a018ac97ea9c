"""Where the app is found: a port that follows from the folder of runs, and a token that only its owner can read.

Both are the same at the next start, so links to episodes and the browser's cookie last.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from engine.errors import StoreError
from engine.store.private import whole_file
from engine.tokens.catalogue import cache_root

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
