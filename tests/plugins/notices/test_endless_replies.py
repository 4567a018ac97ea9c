"""Replies of a webhook that do not end, or unpack to more than there is memory: only their beginning is read."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine.plugins.notices.channels import post

HEAD = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(b"0" * 50_000_000)


class Endless:
    """A server that sends the same bytes until the connection is closed; `closed` is set then."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.closed = threading.Event()
        self._head, self._piece = head, piece
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/hook"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer, _ = self._socket.accept()
        with suppress(OSError), peer:
            peer.sendall(HEAD + self._head + b"\r\n")
            while True:
                peer.sendall(self._piece)
        self.closed.set()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(
    params=[(b"", b"y" * 100_000), (b"Content-Encoding: gzip\r\n", BOMB), (b"", b"z")], ids=["large", "bomb", "drip"]
)
def server(request: pytest.FixtureRequest) -> Iterator[Endless]:
    made = Endless(*request.param)
    yield made
    made.close()


def test_the_beginning_of_an_endless_reply_is_read_and_the_connection_closed(server: Endless) -> None:
    status, text = post(server.url, {"kind": "failed"}, 30.0)
    assert status == 200
    assert 4096 <= len(text) <= 65_536
    assert server.closed.wait(30)
