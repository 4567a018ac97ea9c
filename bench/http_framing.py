"""Compares the engine's reader of HTTP replies with `httptools` (llhttp, the parser of uvicorn), below the same connection class.

    pip install httptools && python bench/http_framing.py

`cost` is the CPU time (user and system) of one request in the client's process, against a server in another process that
answers at once with a reply like SGLang's. Both readers take turns in one run; the least of several rounds is shown, because
everything else on the machine only adds to it. `refusals` are replies that no server should send: a reader must refuse the
reply, or close the connection after it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httptools

from engine.plugins.servers.http.client import Connection, HttpClient
from engine.plugins.servers.http.reply import MAX_BODY, MAX_HEAD, MAX_INTERIM, MalformedReply, ReplyReader


class HttptoolsReader:
    """The interface of `ReplyReader`, over httptools."""

    def __init__(self, known: object) -> None:
        self.start(MAX_BODY)

    def start(self, most: int) -> None:
        """Expect a new reply, whose body may have `most` bytes."""
        self._parser = httptools.HttpResponseParser(self)
        self._most = most
        self._parts: list[bytes] = []
        self._size = self._fed = self._interim = self._chunks = 0
        self._length: int | None = None
        self._chunked = self._in_body = self._whole = self.surplus = False
        self.body: bytes = b""
        self.status = 0
        self.keep = True
        self.retry_after: bytes | None = None

    @property
    def started(self) -> bool:
        """Whether a byte of the reply has arrived."""
        return self._fed > 0

    def release(self) -> None:
        """Nothing is counted over connections here."""

    def feed(self, buffer: bytearray, view: memoryview, count: int) -> bool:
        """Read the first `count` bytes of a buffer. Returns whether the reply is complete."""
        self._fed += count
        try:
            self._parser.feed_data(view[:count])
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedReply(str(error)) from None
        # The parser tells neither the sizes of chunks nor those of their extensions, so what is not body is counted.
        if self._fed - self._size > MAX_HEAD * (self._interim + 1) + 64 * self._chunks:
            raise MalformedReply("headers, chunk lines and trailers are too long")
        return self._whole

    def end(self) -> bool:
        """The server has closed the connection. Returns whether that completes the reply."""
        if not self._in_body or self._chunked or self._length is not None:
            return False
        self.body = b"".join(self._parts)
        return True

    # -- called by the parser

    def on_message_begin(self) -> None:
        if self._whole:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._whole:
            return
        name = name.lower()
        if name == b"content-length":
            self._length = int(value)
            if self._length > self._most:
                raise MalformedReply("the reply is too large")
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise MalformedReply("unsupported transfer encoding")
            self._chunked = True
        elif name == b"retry-after":
            self.retry_after = value

    def on_headers_complete(self) -> None:
        if self._whole:
            return
        self.status = self._parser.get_status_code()
        self.keep = self._parser.should_keep_alive()
        self._in_body = self.status >= 200

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, data: bytes) -> None:
        if self._whole:
            return
        self._size += len(data)
        if self._size > self._most:
            raise MalformedReply("the reply is too large")
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._whole:
            return
        if self.status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise MalformedReply("too many interim replies")
            return
        self._whole = True
        self.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


READERS: dict[str, Callable[[Any], Any]] = {"ours": ReplyReader, "httptools": HttptoolsReader}
BODY = b'{"output_ids":[%b],"meta_info":{"id":"x"}}' % b",".join(b"%d" % token for token in range(1000, 1200))
OK = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n" % len(BODY)
) + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSALS: dict[str, bytes] = {
    "a chunk whose size is over the limit": CHUNKED + b"3e9\r\n",
    "a chunk extension of 100,000 bytes": CHUNKED + b"1;" + b"x" * 100_000,
    "trailers of 100,000 bytes": CHUNKED + b"0\r\n" + b"X: y\r\n" * 17_000,
    "line breaks after the reply": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\r\n\r\n",
    "another reply after the reply": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * 2,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length of +2": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "a chunk size of -1": CHUNKED + b"-1\r\n",
    "interim replies without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
}


class Client(HttpClient):
    """An `HttpClient` with the reader of one's choice."""

    reader: Callable[[Any], Any] = ReplyReader

    def _new_connection(self) -> Connection:
        return Connection(self._buffer, type(self).reader(self._known_heads))


async def serve() -> None:
    """The server's process: answers every request with `OK`, and prints its port."""
    length = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = length.search(head)
                await reader.readexactly(int(found[1]) if found else 0)
                writer.write(OK)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def cost(name: str, port: int, requests: int) -> float:
    """CPU microseconds of one request, with 16 requests in flight."""
    client = type("Chosen", (Client,), {"reader": READERS[name]})(f"http://127.0.0.1:{port}")

    async def worker(count: int) -> None:
        for _ in range(count):
            assert (await client.request("POST", "/generate", b"[1,2,3]")).body == BODY

    await asyncio.gather(*(worker(20) for _ in range(16)))
    began = time.process_time()
    await asyncio.gather(*(worker(requests // 16) for _ in range(16)))
    spent = time.process_time() - began
    await client.close()
    return spent / (requests // 16 * 16) * 1e6


def refuses(name: str, data: bytes) -> bool:
    """Whether a reader refuses a reply, or has the connection closed after it."""
    reader = READERS[name]({})
    reader.start(1000)
    size = 1 << 16
    buffer = bytearray(size)
    try:
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            buffer[: len(piece)] = piece
            if reader.feed(buffer, memoryview(buffer), len(piece)):
                return bool(reader.surplus)
    except (MalformedReply, ValueError):
        return True
    return False


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        try:
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) > 1:
                os.sched_setaffinity(server.pid, cores[1:])
                os.sched_setaffinity(0, cores[:1])
            assert server.stdout is not None
            port = int(server.stdout.readline())
            found: dict[str, list[float]] = {name: [] for name in READERS}
            for _ in range(given.rounds):
                for name in READERS:
                    found[name].append(asyncio.run(cost(name, port, given.requests)))
        finally:
            server.terminate()
    least = {name: min(values) for name, values in found.items()}
    for name, value in least.items():
        print(f"{name:10} {value:6.1f} µs a request   {value / least['ours']:.2f}")
    for what, data in REFUSALS.items():
        told = {name: "refused" if refuses(name, data) else "NOT REFUSED" for name in READERS}
        print(f"{what:40} " + "   ".join(f"{name}: {answer}" for name, answer in told.items()))


if __name__ == "__main__":
    main()
