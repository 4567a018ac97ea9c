"""The HTTP client, against servers that answer byte for byte what a test says."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plugins.servers.http.client import HttpCall, HttpClient
from engine.plugins.servers.http.reply import ChunkedBody, HttpFailure, HttpReply, MalformedReply

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


class Raw:
    """A server that reads one request at a time and writes the next of `answers`; an empty one closes the connection."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self.answers = answers
        self.connections = 0
        self.requests: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                pieces = self.answers.pop(0)
                if not pieces:
                    writer.close()
                    return
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[tuple[Raw, HttpClient]]:
    raw = Raw(list(answers))
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/", headers={"X-Key": "k"})
    try:
        yield raw, client
    finally:
        await client.close()
        server.close()


OK = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]


def whole(reply: HttpReply) -> tuple[int, bytes]:
    """Status and body of a reply, whose head has the same status."""
    assert reply.head.partition(b" ")[2].startswith(b"%d" % reply.status)
    return reply.status, reply.body


async def test_a_request_is_sent_whole_with_its_headers() -> None:
    async with serving(OK) as (raw, client):
        assert whole(await client.request("POST", "/generate", b"[1,", b"2]")) == (200, b"ok")
        port = client.url.rpartition(":")[2].partition("/")[0]
    assert raw.requests == [
        f"POST /base/generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nX-Key: k\r\n"
        "Content-Length: 5\r\n\r\n[1,2]".encode()
    ]


async def test_long_pieces_and_long_replies_keep_their_order() -> None:
    long = [bytes([65 + number]) * 300_000 for number in range(4)]
    body = (b"(", long[0], b"+", b"+", long[1], long[2], b"", b")")
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 600002\r\n\r\n<", long[3], long[0], b">"]
    async with serving(answer, OK) as (raw, client):
        assert whole(await client.request("POST", "/generate", *body)) == (
            200,
            b"".join([b"<", long[3], long[0], b">"]),
        )
        assert whole(await client.request("POST", "/generate", b"1")) == (200, b"ok")
    assert raw.requests[0].partition(b"\r\n\r\n")[2] == b"".join(body)


async def test_a_connection_is_used_again() -> None:
    async with serving(OK, OK, OK) as (raw, client):
        for _ in range(3):
            assert (await client.request("GET", "/")).body == b"ok"
        assert (raw.connections, client.opened) == (1, 1)


async def test_concurrent_requests_have_a_connection_each() -> None:
    async with serving(OK, OK, OK) as (raw, client):
        replies = await asyncio.gather(*(client.request("GET", "/") for _ in range(3)))
        assert [whole(reply) for reply in replies] == [(200, b"ok")] * 3
        assert raw.connections == 3


def test_dropping_a_connection_after_its_loop_is_closed_raises_nothing() -> None:
    loop = asyncio.new_event_loop()

    async def ask() -> tuple[asyncio.Task[HttpReply], Coroutine[Any, Any, HttpReply]]:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        call = client.request("POST", "/", b"x")
        task = loop.create_task(call)
        while not client.opened:  # noqa: ASYNC110  (the client tells nobody)
            await asyncio.sleep(0)
        return task, call

    task, call = loop.run_until_complete(ask())
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    call.close()  # as the garbage collector does with what nobody waits for
    assert not task.done()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\n\r", b"\nhe", b"llo"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding:  Chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhel", b"lo", b""],
        [b"HTTP/1.0 200 OK\r\n\r\nhello", b""],
        [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello"],
    ],
)
async def test_every_way_of_ending_a_body_is_read(pieces: list[bytes]) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert whole(await client.request("GET", "/")) == (200, b"hello")
    await client.close()
    server.close()


async def test_no_content_has_no_body() -> None:
    async with serving([b"HTTP/1.1 204 No Content\r\n\r\n"], OK) as (raw, client):
        assert whole(await client.request("GET", "/")) == (204, b"")
        assert (await client.request("GET", "/")).body == b"ok"
        assert raw.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
        b"X" * 70000,
    ],
)
async def test_what_is_no_http_is_a_failure_and_ends_the_connection(answer: bytes) -> None:
    async with serving([answer], OK) as (raw, client):
        with pytest.raises(MalformedReply):
            await client.request("GET", "/")
        assert (await client.request("GET", "/")).body == b"ok"
        assert raw.connections == 2


async def test_bytes_after_a_reply_never_reach_the_next_request() -> None:
    surplus = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"]
    async with serving(surplus, OK) as (raw, client):
        assert (await client.request("GET", "/")).body == b"ok"
        assert (await client.request("GET", "/")).body == b"ok"
        assert raw.connections == 2


async def test_a_connection_that_was_closed_while_idle_is_replaced_without_an_error() -> None:
    async with serving(OK, [], OK) as (raw, client):
        await client.request("GET", "/")
        assert (await client.request("GET", "/")).body == b"ok"  # the server drops the second request unanswered
        assert (raw.connections, len(raw.requests)) == (2, 3)


async def test_a_fresh_connection_that_breaks_is_a_failure() -> None:
    async with serving([]) as (_, client):
        with pytest.raises(HttpFailure, match="before a reply came") as caught:
            await client.request("GET", "/")
        assert (caught.value.answered, caught.value.reused) == (False, False)


async def test_a_connection_that_breaks_inside_a_body_is_a_failure_and_not_sent_again() -> None:
    half = [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(half[0])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(HttpFailure, match="in the middle of a reply") as caught:
        await client.request("GET", "/")
    assert caught.value.answered
    assert client.opened == 1
    await client.close()
    server.close()


async def test_nobody_listening_is_a_failure_that_names_the_server() -> None:
    client = HttpClient("http://127.0.0.1:9")
    with pytest.raises(HttpFailure, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        await client.request("GET", "/")


async def test_a_cancelled_request_gives_its_connection_up() -> None:
    async with serving(OK, [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nla"], OK) as (raw, client):
        await client.request("GET", "/")
        task = asyncio.create_task(client.request("GET", "/late"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.request("GET", "/")).body == b"ok"
        assert raw.connections == 2


async def test_closing_fails_what_is_in_flight() -> None:
    async with serving([b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nla"]) as (_, client):
        task = asyncio.create_task(client.request("GET", "/"))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(HttpFailure, match="the client was closed"):
            await task


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://host", "http://", "http://host/?a=b", "http://host:port"])
def test_a_url_that_is_no_servers_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|[Pp]ort"):
        HttpClient(url)


def test_a_header_cannot_smuggle_in_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://host", headers={"Authorization": "Bearer a\r\nX: y"})


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    extension=st.sampled_from([b"", b";a=b", b" "]),
    trailer=st.sampled_from([b"", b"X-T: 1\r\n"]),
    rest=st.binary(max_size=8),
)
def test_a_chunked_body_is_read_wherever_it_is_cut(
    chunks: list[bytes], cuts: list[int], extension: bytes, trailer: bytes, rest: bytes
) -> None:
    data = (
        b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks) + b"0\r\n" + trailer + b"\r\n"
    )
    body = ChunkedBody(10_000)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    for piece in pieces[:-1]:
        assert body.feed(piece) is None
    assert body.feed(pieces[-1] + rest) == rest
    assert bytes(body.data) == b"".join(chunks)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_no_bytes_make_a_chunked_body_raise_anything_but_malformed(data: bytes, size: int) -> None:
    body = ChunkedBody(10_000)
    try:
        for at in range(0, len(data), size):
            if body.feed(data[at : at + size]) is not None:
                break
    except MalformedReply:
        pass


def head(length: int, *lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, f"content-length: {length}", "server: x", "", ""]).encode()


async def test_heads_that_differ_in_their_length_alone_are_told_apart() -> None:
    bodies = [b"one", b"", b"three", b"x" * 70_000, b"five"]
    async with serving(*([head(len(body)) + body] for body in bodies)) as (raw, client):
        assert [(await client.request("GET", "/")).body for _ in bodies] == bodies
    assert raw.connections == 1


async def test_a_head_that_was_met_says_again_what_it_said() -> None:
    gone = head(2, "connection: close", status="404 Not Found") + b"no"
    async with serving([head(2) + b"ok"], [gone], [gone], [head(0, status="204 No Content")], [gone]) as (raw, client):
        said = [await client.request("GET", "/") for _ in range(5)]
    assert [(reply.status, reply.body) for reply in said] == [
        (200, b"ok"),
        (404, b"no"),
        (404, b"no"),
        (204, b""),
        (404, b"no"),
    ]
    assert raw.connections == 3


@pytest.mark.parametrize("lengths", [("2", "3"), ("+2",), ("2x",), ("9999999999999",)])
async def test_a_length_that_is_none_is_refused_though_its_like_was_met(lengths: tuple[str, ...]) -> None:
    bad = "\r\n".join(["HTTP/1.1 200 OK", *(f"content-length: {length}" for length in lengths), "server: x", "", ""])
    async with serving([head(2) + b"ok"], [bad.encode() + b"ok"]) as (_, client):
        assert (await client.request("GET", "/")).body == b"ok"
        with pytest.raises(MalformedReply):
            await client.request("GET", "/")


class _Call(HttpCall):
    """A request that notes its replies, and sends the next ones from the callback in which a reply arrives."""

    def __init__(self, client: HttpClient, count: int, *, trusted: bool = True) -> None:
        super().__init__(client.pieces("GET", "/"))
        self.client = client
        self.left = count
        self.trusted = trusted
        self.replies: list[tuple[int, bytes]] = []

    def received(self, status: int, body: bytes, retry_after: float | None, head: bytes) -> bool:
        self.replies.append((status, body))
        self.left -= 1
        if self.left:
            self.client.start(self)
        else:
            self.over.set_result(None)
        return self.trusted

    def lost(self, failure: HttpFailure) -> None:
        raise AssertionError("a reply came")


async def test_the_callback_that_gets_a_reply_may_send_the_next_request() -> None:
    async with serving(OK, [b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nbad"], OK) as (_, client):
        call = _Call(client, 3)
        client.start(call)
        await call.over
        assert call.replies == [(200, b"ok"), (500, b"bad"), (200, b"ok")]
        assert client.opened == 1


async def test_a_connection_whose_reply_may_belong_to_another_request_is_not_used_again() -> None:
    async with serving(OK, OK) as (_, client):
        call = _Call(client, 1, trusted=False)
        client.start(call)
        await call.over
        assert (await client.request("GET", "/")).body == b"ok"
        assert client.opened == 2


async def test_a_request_that_is_cancelled_before_the_round_ends_is_never_sent() -> None:
    async with serving(OK, OK) as (raw, client):
        assert (await client.request("GET", "/first")).body == b"ok"
        asked = asyncio.create_task(client.request("GET", "/second"))
        asyncio.get_running_loop().call_soon(asked.cancel)  # runs behind the request's first step, ahead of the sending
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await client.request("GET", "/third")).body == b"ok"
    assert [request.split()[1] for request in raw.requests] == [b"/base/first", b"/base/third"]


def certified(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="NOT CHECKED OVER TLS: there is no openssl to make a certificate"
)
async def test_replies_of_any_size_arrive_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certified(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    bodies = [b"ok", b"", b"x" * 700_000, b"y" * 5]
    raw = Raw([[head(len(body)) + body] for body in bodies])
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0, ssl=context)
    client = HttpClient(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        assert [(await client.request("POST", "/", b"[1]")).body for _ in bodies] == bodies
        assert raw.connections == 1
    finally:
        await client.close()
        server.close()
