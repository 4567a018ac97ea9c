"""Malformed requests to each service: the right status, an error in the service's form, and the end of the connection where HTTP wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_http import SERVICES, Service, check_lives, connect, read_answer, send, service_of

MALFORMED: dict[str, tuple[str, int]] = {
    "no HTTP": ("\0\1 nonsense\r\n\r\n", 400),
    "a TLS hello": ("\x16\x03\x01\x02\0\1\0\1\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no version": ("GET /\r\n\r\n", 400),
    "no host": ("GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a space before the colon": ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "a line that goes on": ("GET / HTTP/1.1\r\nHost: a\r\n\x01b: c\r\n\r\n", 400),
    "a null byte": ("GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", 400),
    "a path with a byte of 8 bits": ("GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two lengths": ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "a negative length": ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -2\r\n\r\n{}", 400),
    "a length that is no number": ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: two\r\n\r\n{}", 400),
    "a length of 30 digits": (f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {'9' * 30}\r\n\r\n", 400),
    "a length and chunks": (
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    "an unknown encoding": ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    "a head of 200 kB": (f"GET / HTTP/1.1\r\nHost: a\r\nX: {'x' * 200_000}\r\n\r\n", 431),
    "40,000 headers": ("GET / HTTP/1.1\r\nHost: a\r\n" + "X: y\r\n" * 40_000 + "\r\n", 431),
    "a path of 200 kB": (f"GET /{'x' * 200_000} HTTP/1.1\r\nHost: a\r\n\r\n", 431),
}
"""By what is wrong: the request, and its status."""
BODIES: dict[str, tuple[bytes, int]] = {
    "no JSON": (b"{", 400),
    "no object": (b"[1]", 400),
    "half a character": (b'{"id": "\xc3"}', 400),
    "a lone surrogate": (
        b'{"id": "\\ud800", "task": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
    ),
    "deep": (b'{"id":' * 5000, 400),
    "deep lists": (b'{"id":' + b"[" * 100_000, 400),
    "NaN": (b'{"id": NaN, "task": NaN, "messages": NaN}', 400),
    "a number of 6,000 digits": (b'{"id": 1' + b"0" * 6000 + b"}", 400),
    "other types": (b'{"id": {}, "task": {}, "messages": {}}', 400),
}


@pytest_asyncio.fixture(params=SERVICES)
async def service(request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer_dir: Path) -> AsyncIterator[Service]:
    async with service_of(request.param, tmp_path, tiny_tokenizer_dir) as opened:
        yield opened


def length(body: bytes) -> str:
    return f"Content-Length: {len(body)}"


async def test_a_malformed_request_gets_its_status_and_the_end_of_the_connection(service: Service) -> None:
    for what, (text, status) in MALFORMED.items():
        answer = await send(service.address, text.encode("latin-1"))
        assert (answer.status, answer.closes) == (status, True), what
        assert answer.value["error"].keys() >= {"message", "code"}, what
        assert len(answer.value["error"]["message"]) < 500, what
    await check_lives(service)


async def test_a_malformed_body_gets_400_in_the_form_of_the_service(service: Service) -> None:
    reader, writer = await connect(service.address)
    for what, (body, status) in BODIES.items():
        writer.write(service.head("POST", service.posts, length(body)) + body)
        answer = await read_answer(reader)
        assert (answer.status, answer.closes) == (status, False), what
        assert answer.value["error"].keys() >= {"message", "code"}, what
        assert len(answer.value["error"]["message"]) < 500, what
    writer.close()
    for chunk in (b"x\r\n{}\r\n0\r\n\r\n", b"2;" + b"x" * 200_000, b"-2\r\n{}\r\n", b"2\r\n{}}}\r\n0\r\n\r\n"):
        answer = await send(service.address, service.head("POST", service.posts, "Transfer-Encoding: chunked") + chunk)
        assert answer.status in (400, 431), chunk[:20]
        assert answer.closes
    await check_lives(service)


async def test_a_body_is_not_read_before_its_token_and_its_length_are_checked(service: Service) -> None:
    """The body never comes, so an answer shows that none was waited for."""
    for token in ("", "wrong", "\xe9"):
        for path in (service.posts, "/episodes/a%2F0/end", "/v1/reward", "/nothing"):
            for framing in ("Content-Length: 42000000", "Transfer-Encoding: chunked"):
                answer = await send(service.address, service.head("POST", path, framing, token=token))
                assert (answer.status, answer.closes) == (401, True), (path, token)
    for size in (65 << 20, 10**15):
        answer = await send(service.address, service.head("POST", service.posts, f"Content-Length: {size}"))
        assert (answer.status, answer.closes) == (413, True)
    head = service.head("POST", service.posts, "Expect: 100-continue", "Content-Length: 1")
    assert (await send(service.address, head + b"{")).status == 400
    await check_lives(service)


async def test_a_refused_request_whose_body_came_leaves_the_connection_open(service: Service) -> None:
    reader, writer = await connect(service.address)
    for token, status in (("wrong", 401), (service.token, 400)):
        writer.write(service.head("POST", service.posts, length(b"[1]"), token=token) + b"[1]")
        answer = await read_answer(reader)
        assert (answer.status, answer.closes) == (status, False)
    writer.close()


async def test_other_methods_and_targets_are_answered(service: Service) -> None:
    for method, path in (
        ("HEAD", service.good),
        ("HEAD", "/nothing"),
        ("OPTIONS", "*"),
        ("CONNECT", "a:1"),
        ("GET", "http://a/health"),
        ("POST", "/episodes/%FF%zz%00/end"),
        ("GET", "/v1/models/%FF"),
        ("BREW", service.good),
        ("GET", service.good + "?a=%00"),
    ):
        for token in ("", "wrong", service.token):
            answer = await send(service.address, service.head(method, path, token=token), bodyless=method == "HEAD")
            assert 200 <= answer.status < 500, (method, path)
    upgrade = service.head("GET", service.good, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c")
    assert (await send(service.address, upgrade)).status == 200
    old = f"GET {service.good} HTTP/1.0\r\nAuthorization: Bearer {service.token}\r\n\r\n".encode()
    assert (await send(service.address, old)).status == 200


PIECES = [
    *(text.encode("latin-1")[:400] for text, _ in MALFORMED.values()),
    *(body[:400] for body, _ in BODIES.values()),
    b"GET ", b"POST ", b" HTTP/1.1", b"\r\n", b"Host: a", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"/health", b"/episodes", b"/episodes/a%2F0/end", b"/groups", b"/cancel", b"/weights", b"/v1/reward", b"/v1/messages",
    b"/v1/chat/completions", b"\r\n\r\n", b"{}", b"7", b"0\r\n\r\n", b"Authorization: Bearer TOKEN",
]  # fmt: skip


@pytest.mark.parametrize("kind", SERVICES)
async def test_no_bytes_give_500_or_a_traceback(
    kind: str, tmp_path: Path, tiny_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    async with service_of(kind, tmp_path, tiny_tokenizer_dir) as service:
        for data in examples(st.lists(st.sampled_from(PIECES) | st.binary(max_size=40), max_size=12).map(b"".join)):
            raw = data.replace(b"TOKEN", service.token.encode())
            reader, writer = await connect(service.address)
            writer.write(raw)
            writer.write_eof()
            answers = await reader.read()
            writer.close()
            assert not answers or answers.startswith(b"HTTP/1.1 "), raw
            assert b"HTTP/1.1 5" not in answers.replace(b"HTTP/1.1 501 ", b"").replace(b"HTTP/1.1 505 ", b""), raw
        await check_lives(service)
    assert broken == []
    assert "Traceback" not in "".join(capsys.readouterr())


def examples(strategy: st.SearchStrategy[bytes], count: int = 60) -> list[bytes]:
    found: list[bytes] = []

    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: bytes) -> None:
        found.append(value)

    collect()
    return found
