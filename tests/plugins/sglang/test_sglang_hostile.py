"""The connection code and the checks of replies, against servers that write what no server should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from examples import examples
from generate_requests import generate_request as request
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_cluster import OUTPUT, Call, answers, changed, cluster

from engine.errors import BackendError
from engine.plugins.servers.http import reply
from engine.plugins.servers.http.client import HttpClient
from engine.plugins.servers.http.reply import MAX_INTERIM, HttpFailure, MalformedReply, ReplyReader, retry_seconds
from engine.tokens.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- log-probs


def with_logprob(value: float, at: int) -> Any:
    rows = [[value if place == at else -0.5, token, None] for place, token in enumerate(OUTPUT)]
    return changed(output_token_logprobs=rows)


@pytest.mark.parametrize("value", [1e-4, 0.1, 1.0, 3e38])
@pytest.mark.parametrize("at", [0, len(OUTPUT) - 1])
async def test_a_log_prob_above_0_is_a_bad_reply_and_asked_for_again(
    chat_format: ChatTemplate, value: float, at: int
) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(with_logprob(value, at))
        generation = await it.backend.generate(request())
        assert generation.logprobs.max() <= 0
        assert (it.counts["attempts"], it.counts["bad_replies"]) == (2, 1)


async def test_what_float32_loses_at_probability_1_is_no_bad_reply(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        it.fake.faults.append(with_logprob(1.1920929e-07, 0))
        assert (await it.backend.generate(request())).logprobs[0] == pytest.approx(1.1920929e-07)
        assert it.counts["attempts"] == 1


# -- replies that come twice


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["at once", "late"])
async def test_a_reply_that_comes_twice_is_never_another_request_s(chat_format: ChatTemplate, pause: float) -> None:
    """Each reply is sent again, on the same connection, in front of the next one: where another prompt was sent."""
    before: list[bytes] = []

    async def twice(call: Call) -> None:
        if before:
            call.answer(before.pop())
            await asyncio.sleep(pause)
        body = call.reply()
        before.append(body)
        call.answer(body)

    async with cluster(chat_format) as it:
        for number in range(6):
            it.fake.faults.append(twice)
            generation = await it.backend.generate(request([1, 22, 300 + number]))
            assert generation.output_ids.tolist() == OUTPUT
        assert it.counts["certificate"] == {"turns_checked": 6, "turns_unchecked": 0, "prompt_mismatches": 0}
        assert it.counts["retries"] == it.counts["bad_replies"] <= 5


async def test_a_connection_that_gave_another_request_s_reply_is_not_used_again(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        await it.backend.generate(request())
        opened = it.counts["servers"][0]["connections"]
        it.fake.faults.append(changed(id="another", prompt_token_ids=[7, 7, 7]))
        await it.backend.generate(request())
        assert it.counts["servers"][0]["connections"] == opened + 1


# -- HTTP


@asynccontextmanager
async def writing(*pieces: bytes, forever: bytes = b"") -> AsyncIterator[HttpClient]:
    """A server that answers each request with these bytes, then with `forever` until the client has gone."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            while forever:
                writer.write(forever)
                await writer.drain()
                await asyncio.sleep(0)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        await client.close()
        server.close()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("in_one_piece", [1, 4000])
@pytest.mark.parametrize("interim", [CONTINUE, b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"])
async def test_interim_replies_without_end_are_refused(interim: bytes, in_one_piece: int) -> None:
    async with writing(forever=interim * in_one_piece) as client:
        with pytest.raises(MalformedReply, match="interim replies"):
            await client.request("POST", "/generate", b"{}")


async def test_some_interim_replies_are_passed_over() -> None:
    async with writing(CONTINUE * MAX_INTERIM, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as client:
        assert (await client.request("POST", "/generate", b"{}")).body == b"ok"


LARGE = {
    "by its length": (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", b""),
    "by its chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", b""),
    "by its chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"a\r\n0123456789\r\n"),
    "until the connection ends": (b"HTTP/1.1 200 OK\r\n\r\n", b"0123456789"),
    "by its trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: 0\r\n"),
}


@pytest.mark.parametrize("name", list(LARGE))
async def test_a_body_larger_than_what_was_asked_for_is_refused(name: str) -> None:
    head, forever = LARGE[name]
    async with writing(head, forever=forever) as client:
        with pytest.raises(MalformedReply, match=r"1000|trailers"):
            await client.request("POST", "/generate", b"{}", most=1000)
    assert ReplyReader.all_held == 0


async def test_the_bound_of_a_reply_follows_from_its_request(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format) as it:
        for tokens in (1, 8):
            most = (1 << 20) + 2 * len("1,22,333") + 1024 * tokens

            async def long(call: Call, size: int) -> None:
                call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)

            it.fake.faults.append(lambda call, size=most + 1: long(call, size))
            await it.backend.generate(request(max_new_tokens=tokens))
            assert it.counts["retries"] >= 1
            refused = it.counts["retries"]
            whole = json.dumps({"pad": " " * 100}).encode()
            it.fake.faults.append(answers(whole))  # small, and still no reply: refused for what it is, not for its size
            await it.backend.generate(request(max_new_tokens=tokens))
            assert it.counts["retries"] == refused + 1


async def test_unfinished_bodies_are_bounded_over_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty connections whose bodies never end: none may be large, and together they may not be either."""
    monkeypatch.setattr(reply, "MAX_HELD", 200_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n"
    highest = 0
    async with writing(head, b"x" * 30_000) as client:
        tasks = [asyncio.create_task(client.request("GET", "/")) for _ in range(30)]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            highest = max(highest, ReplyReader.all_held)
        failed = [task for task in tasks if task.done()]
        with pytest.raises(MalformedReply, match="incomplete replies of all connections are larger than 200000 bytes"):
            failed[0].result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert 0 < highest <= 200_000
    assert ReplyReader.all_held == 0


@settings(derandomize=True, max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 X\r\n\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello",
                b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"Retry-After: 1\r\n", b"\xff\x00",
                b"HTTP/1.1 429 X\r\nRetry-After: x\r\nContent-Length: 0\r\n\r\n",
            ]
        ),
        max_size=8,
    )
)  # fmt: skip
def test_no_bytes_of_a_server_end_in_anything_but_a_reply_or_a_failure(pieces: list[bytes]) -> None:
    async def ask() -> None:
        async with writing(*pieces) as client:
            try:
                async with asyncio.timeout(0.02):
                    await client.request("GET", "/", most=1000)
            except (HttpFailure, TimeoutError):
                pass

    asyncio.run(ask())
    assert ReplyReader.all_held == 0


# -- Retry-After


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"8", 8.0),
        (b" 0.5 ", 0.5),
        (b"0", 0.0),
        (b"Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        (b"Thursday, 01-Jan-70 00:02:00 GMT", 20.0),
        (b"Thu Jan  1 00:02:00 1970", 20.0),
        (b"Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        (b"-5", None),
        (b"", None),
        (b"soon", None),
        (b"1e9", None),
        (b"9" * 400, None),
        (b"Thu, 99 Jan 1970 00:02:00 GMT", None),
        (b"Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        (b"\xff\xfe", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(value: bytes, seconds: float | None) -> None:
    assert retry_seconds(value, now=100.0) == seconds


async def test_retry_after_is_read_wherever_it_stands_and_again_where_its_head_was_met() -> None:
    reply = b"HTTP/1.1 429 X\r\nretry-after: 7\r\nContent-Length: 0\r\nServer: x\r\n\r\n"
    fine = b"HTTP/1.1 200 OK\r\nretry-after: 7\r\nContent-Length: 0\r\n\r\n"
    async with writing(reply) as client:
        for _ in range(3):
            assert (await client.request("GET", "/")).retry_after == 7.0
            client.drop_idle()
    async with writing(fine) as client:
        assert (await client.request("GET", "/")).retry_after is None


async def test_a_hostile_server_fails_its_request_and_no_other(chat_format: ChatTemplate) -> None:
    async def endless(call: Call) -> None:
        call.send(CONTINUE * 5000)

    async with cluster(chat_format, 2, retries=0) as it:
        await it.backend.generate(request(episode="a"))
        await it.backend.generate(request(episode="b"))
        it.fakes[0].faults.append(endless)
        outcomes = await asyncio.gather(
            *(it.backend.generate(request(episode=name)) for name in "ab"), return_exceptions=True
        )
        assert sum(isinstance(outcome, BackendError) for outcome in outcomes) == 1
