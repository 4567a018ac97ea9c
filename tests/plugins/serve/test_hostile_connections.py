"""Connections that send nothing, little, or too much to each service: a good client goes on, and each of them ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from raw_http import SERVICES, Service, check_lives, connect, read_answer, send, service_of
from wire_kit import endpoint

from engine.logs import Seldom
from engine.plugins.agents.connection import BODY_SECONDS, HEAD_SECONDS, MAX_BODY, MAX_VALUES, MAX_WAITING_BYTES
from engine.plugins.agents.server import server_of_loop

FEW = 16
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller limits; `test_flooding_program.py` has the real ones."""
    monkeypatch.setattr("engine.plugins.agents.connection.MAX_OF_KEY", FEW)
    monkeypatch.setattr("engine.plugins.agents.connection.MAX_OF_PEER", FEW)


@pytest_asyncio.fixture(params=SERVICES)
async def service(request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer_dir: Path) -> AsyncIterator[Service]:
    async with service_of(request.param, tmp_path, tiny_tokenizer_dir) as opened:
        yield opened


async def links_of(address: str, count: int, data: bytes = b"") -> list[Link]:
    """Connections that have sent some bytes."""
    links = []
    for _ in range(count):
        links.append(await connect(address))
        links[-1][1].write(data)
    return links


async def is_over(link: Link) -> None:
    """Wait until the service has closed a connection."""
    try:
        while await link[0].read(1 << 16):
            pass
    except ConnectionError:
        pass


def close(links: Sequence[Link]) -> None:
    for _, writer in links:
        writer.close()


@pytest.mark.parametrize(
    "data", [b"", b"GET /health HTT", b"POST /groups HTTP/1.1\r\nHost: a\r\nX: "], ids=["silent", "a line", "a head"]
)
async def test_half_open_connections_of_a_peer_take_no_place_of_a_good_client(service: Service, data: bytes) -> None:
    first = await links_of(service.address, FEW, data)
    more = await links_of(service.address, 10, data)
    for link in first[:10]:  # each of the others closes the oldest
        await is_over(link)
    await check_lives(service)
    assert not more[-1][0].at_eof()
    close(first + more)


@pytest.mark.skipif(sys.platform != "linux", reason="other addresses of this machine")
async def test_half_open_connections_of_many_peers_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer that has most loses its oldest."""
    monkeypatch.setattr("engine.plugins.agents.connection.MAX_WITHOUT_KEY", FEW)
    async with endpoint() as (address, _):
        host, port = address.removeprefix("http://").split(":")
        several = [await asyncio.open_connection(host, int(port), local_addr=("127.0.0.9", 0)) for _ in range(3)]
        single = [
            await asyncio.open_connection(host, int(port), local_addr=(f"127.0.1.{at}", 0)) for at in range(1, FEW)
        ]
        for link in several[:2]:
            await is_over(link)
        service = Service(address, "key", "/v1/models", "/v1/chat/completions")
        await check_lives(service)
        assert not any(reader.at_eof() for reader, _ in single)
        close([*several, *single])


async def test_a_head_that_comes_byte_by_byte_ends(service: Service) -> None:
    [link] = await links_of(service.address, 1, service.head("GET", service.good)[:20])
    for _ in range(HEAD_SECONDS):
        link[1].write(b"x")
        await check_lives(service)  # the service has read it by then
        server_of_loop().admission.tick()
    assert (await read_answer(link[0])).status in (0, 408)  # 0: it was closed with a byte that was not read
    await is_over(link)
    close([link])


async def test_a_body_that_comes_byte_by_byte_ends(service: Service) -> None:
    [link] = await links_of(service.address, 1, service.head("POST", service.posts, "Content-Length: 1000"))
    for second in range(BODY_SECONDS):
        link[1].write(b" ")
        if second % 40 == 0:
            await check_lives(service)
        server_of_loop().admission.tick()
    assert (await read_answer(link[0])).status in (0, 408)
    await is_over(link)
    close([link])


async def test_a_refused_sender_that_never_stops_ends(service: Service) -> None:
    [endless] = await links_of(
        service.address, 1, service.head("POST", service.posts, "Content-Length: 42000000", token="wrong")
    )
    for _ in range(HEAD_SECONDS):
        endless[1].write(b"x" * 1000)
        await check_lives(service)
        server_of_loop().admission.tick()
    await is_over(endless)
    close([endless])


async def test_many_small_requests_at_once_hold_no_other_client_up(service: Service) -> None:
    [(reader, writer)] = await links_of(service.address, 1, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
    await check_lives(service)
    first = await reader.read(1 << 20)
    assert 0 < first.count(b"HTTP/1.1 ") < 1000
    close([(reader, writer)])


async def test_who_does_not_read_its_answers_is_closed(tmp_path: Path) -> None:
    async with endpoint():
        listener = await server_of_loop().listen_on_file(tmp_path / "a")
        link = await asyncio.open_unix_connection(tmp_path / "a", limit=1)
        link[1].write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 20_000)
        left = -1
        while left != (left := link[1].transport.get_write_buffer_size()):  # until the service reads no more requests
            for _ in range(200):
                await asyncio.sleep(0)
        assert left > 0
        for _ in range(HEAD_SECONDS):
            server_of_loop().admission.tick()
        await is_over(link)
        close([link])
        listener.close()


async def test_a_client_with_the_token_may_be_silent_between_its_requests(service: Service) -> None:
    reader, writer = await connect(service.address)
    for _ in range(2):
        writer.write(service.head("GET", service.good if service.good != "/health" else "/episodes"))
        assert (await read_answer(reader)).status in (200, 405)
        for _ in range(2 * BODY_SECONDS):
            server_of_loop().admission.tick()
    writer.close()


async def test_connections_with_a_key_are_limited_and_the_silent_ones_give_way() -> None:
    async with endpoint() as (address, answers):
        service = Service(address, "key", "/v1/models", "/v1/chat/completions")
        silent = await links_of(address, FEW, service.head("GET", service.good))
        for link in silent:
            await read_answer(link[0])
        answers.wait = 1e6
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Q"}]}).encode()
        request = service.head("POST", service.posts, f"Content-Length: {len(body)}") + body
        busy = await links_of(address, FEW, request)
        await asyncio.gather(*map(is_over, silent))
        answer = await send(address, request)
        assert (answer.status, answer.value["error"]["code"]) == (429, "too_many_connections")
        answers.wait = 0.0
        await server_of_loop().open("other", answers)  # another episode on the same machine
        assert (await send(address, service.head("GET", service.good, token="other"))).status == 200
        await server_of_loop().close("other")
        close(busy + silent)


async def test_a_key_that_is_over_frees_its_connections() -> None:
    async with endpoint() as (address, answers):
        await server_of_loop().open("other", answers)
        service = Service(address, "other", "/v1/models", "/v1/chat/completions")
        [link] = await links_of(address, 1, service.head("GET", service.good))
        assert (await read_answer(link[0])).status == 200
        await server_of_loop().close("other")
        for _ in range(BODY_SECONDS):
            server_of_loop().admission.tick()
        await is_over(link)
        close([link])


async def test_large_bodies_with_the_token_are_bounded(service: Service) -> None:
    """In values, which hold the event loop while they are read, and in bytes."""
    zeros = b"[" + b"0," * (MAX_VALUES + 1) + b"0]"
    answer = await send(service.address, service.head("POST", service.posts, f"Content-Length: {len(zeros)}") + zeros)
    assert (answer.status, "250000 commas" in answer.value["error"]["message"]) == (400, True)
    path, most = ("/v1/reward", 1 << 16) if service.token == "key" else (service.posts, 1 << 20)
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = service.head("POST", path, "Transfer-Encoding: chunked")
    answer = await send(service.address, head + chunk * (most // 65536 + 1))
    assert (answer.status, answer.closes) == (413, True)
    await check_lives(service)


@pytest.mark.slow
async def test_the_bytes_of_a_key_that_wait_are_bounded() -> None:
    async with endpoint() as (address, answers):
        answers.wait = 1e6
        service = Service(address, "key", "/v1/models", "/v1/chat/completions")
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (MAX_BODY - 200)}}
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": [image]}]}).encode()
        request = service.head("POST", service.posts, f"Content-Length: {len(body)}") + body
        busy = []
        for _ in range(MAX_WAITING_BYTES // MAX_BODY):
            busy += await links_of(address, 1, request)
            await busy[-1][1].drain()
        while len(answers.asked) < len(busy):
            await check_lives(service)
        answer = await send(address, request)
        assert (answer.status, answer.value["error"]["code"]) == (429, "too_many_bytes")
        close(busy)


async def test_what_follows_a_request_is_not_read_without_end_while_it_is_answered() -> None:
    async with endpoint() as (address, answers):
        answers.wait = 0.05
        service = Service(address, "key", "/v1/models", "/v1/chat/completions")
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Q"}]}).encode()
        [(reader, writer)] = await links_of(
            address, 1, service.head("POST", service.posts, f"Content-Length: {len(body)}") + body + b"x" * (24 << 20)
        )
        assert (await read_answer(reader)).status == 200
        assert writer.transport.get_write_buffer_size() > 1 << 20
        close([(reader, writer)])


async def test_connections_of_one_socket_file_take_no_place_of_another(tmp_path: Path) -> None:
    async with endpoint() as (address, _):
        service = Service(address, "key", "/v1/models", "/v1/chat/completions")
        listeners = [await server_of_loop().listen_on_file(tmp_path / name) for name in ("a", "b")]
        first = [await asyncio.open_unix_connection(tmp_path / "a") for _ in range(FEW + 10)]
        for link in first[:10]:
            await is_over(link)
        other = await asyncio.open_unix_connection(tmp_path / "b")
        other[1].write(service.head("GET", service.good))
        assert (await read_answer(other[0])).status == 200
        await check_lives(service)
        close([*first, other])
        for listener in listeners:
            listener.close()


def test_a_kind_of_log_line_is_written_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [0.0], []

    class Log:
        def warning(self, event: str, **values: object) -> None:
            lines.append((event, values))

    monkeypatch.setattr("engine.logs.time.monotonic", lambda: now[0])
    log = Seldom(Log())
    for now[0] in (0.0, 0.2, 0.9, 1.0, 1.5, 5.0):
        log.warning("full", peer="a")
    log.warning("slow")
    assert lines == [
        ("full", {"peer": "a"}),
        ("full", {"peer": "a", "left_out": 2}),
        ("full", {"peer": "a", "left_out": 1}),
        ("slow", {}),
    ]


FEW_DESCRIPTORS = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 80))
from engine.plugins.agents import connection
from engine.plugins.agents.server import server_of_loop
from engine.plugins.serve.http import JsonService
if sys.argv[1] == "none left":  # what else the process has open may take the rest
    connection.raise_descriptors = lambda: 1 << 16
async def main():
    address = await server_of_loop().listen("127.0.0.1", 0, JsonService("token", lambda: {}).answer)
    print(address, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["raised", "none left"])
async def test_a_process_without_descriptors_serves_on_and_says_so_once_a_second(case: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW_DESCRIPTORS, case, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    address, limit = (await process.stdout.readline()).decode().split()
    assert limit == ("80" if case == "raised" else "40")
    links: list[Link] = []
    for _ in range(20):
        links += await links_of(address, 50)
        assert (await send(address, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200
    close(links)
    process.kill()
    lines = (await process.communicate())[0].decode().splitlines()
    assert 0 < len(lines) < 100
    assert not [line for line in lines if "Traceback" in line]
