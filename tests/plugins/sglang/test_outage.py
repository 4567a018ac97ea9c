"""Requests of both backends while their server is away, refuses, or leaves a request without a reply."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from generate_requests import generate_request as request
from outage_server import Server
from sglang_cluster import Call, cluster
from slow_cases import each_once, slow_after

from engine.backends.outage import Outage
from engine.clocks import PausableClocks
from engine.errors import BackendError, OutageError
from engine.plugin import entries
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.message import Message
from engine.tokens.template import ChatTemplate

KINDS = ["sglang", *({"openai"} & set(entries("backends")))]
MESSAGES = [Message(role="user", content="hi")]


class One:
    """One backend and its one server, which starts on demand on the same port."""

    def __init__(self, kind: str, format: ChatTemplate, **spec: Any) -> None:
        self.kind = kind
        self._format = format
        self._spec = spec
        self.port = 0
        self.server: Server
        self.backend: Any

    async def start(self, *, refuse: float = 0.0, retry_after: str = "none", status: int = 429) -> None:
        arguments = argparse.Namespace(
            latency=0.01, serve=0, refuse=refuse, retry_after=retry_after, status=status, no_echo=False
        )
        self.server = Server(arguments)
        url = await self.server.start(port=self.port)
        self.port = int(url.rpartition(":")[2])

    async def open(self) -> None:
        url = f"http://127.0.0.1:{self.port}"
        if self.kind == "openai":
            from engine.plugins.chat_apis.openai import OpenAIBackend
            from engine.plugins.chat_apis.spec import OpenAIBackendSpec

            spec = OpenAIBackendSpec.model_validate({"url": f"{url}/v1", "model": "m", "timeout": 20, **self._spec})
            self.backend = OpenAIBackend(spec, self._format)
        else:
            sglang = SGLangBackendSpec.model_validate({"urls": [url], "timeout": 20, **self._spec})
            self.backend = SGLangBackend(sglang, self._format, sampling=SamplingParams(), model="fake")
        await self.backend.start()

    async def ask(self, name: str = "e") -> Any:
        generation = await self.backend.generate(request(episode=name, messages=MESSAGES, max_new_tokens=64))
        return generation.text or generation.output_ids.tolist()


@asynccontextmanager
async def one(kind: str, format: ChatTemplate, **spec: Any) -> AsyncIterator[One]:
    made = One(kind, format, **spec)
    await made.start()
    await made.open()
    try:
        yield made
    finally:
        await made.backend.close()
        await made.server.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_wait_for_a_server_that_is_away(chat_format: ChatTemplate, kind: str) -> None:
    async with one(kind, chat_format, retries=1) as it:
        right = await it.ask()
        await it.server.stop()
        tasks = [asyncio.create_task(it.ask(f"e{number}")) for number in range(16)]
        outage = it.backend.outage
        while not outage.closed:  # noqa: ASYNC110  (until the backend has found out)
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        assert f":{it.port}" in (outage.told() or "")
        await it.start()
        assert await asyncio.gather(*tasks) == [right] * 16
        stats = it.backend.stats()
        assert (stats["turns"], stats["outages"]) == (17, 1)
        assert stats["outage_seconds"] > 0
        assert outage.told() is None


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_uses_up_no_try_and_a_pause_is_kept(chat_format: ChatTemplate, kind: str, status: int) -> None:
    """`retries: 0`, and a server that refuses for longer than quick retries would take."""
    async with one(kind, chat_format, retries=0) as it:
        right = await it.ask()
        await it.server.stop()
        await it.start(refuse=0.7, retry_after="1", status=status)
        if kind == "sglang":
            it.backend.pool.servers[0].http.drop_idle()  # type: ignore[union-attr]
        assert await asyncio.gather(*(it.ask(f"e{number}") for number in range(8))) == [right] * 8
        heeded = status in (429, 503)  # for the others no pause is read
        assert not heeded or it.server.refused <= 8  # nobody asked a second time before the pause was over


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_pause_until_a_date_is_kept(chat_format: ChatTemplate, kind: str) -> None:
    async with one(kind, chat_format, retries=0) as it:
        right = await it.ask()
        await it.server.stop()
        await it.start(refuse=1.0, retry_after="date")
        if kind == "sglang":
            it.backend.pool.servers[0].http.drop_idle()  # type: ignore[union-attr]
        assert await asyncio.gather(*(it.ask(f"e{number}") for number in range(8))) == [right] * 8
        assert it.server.refused <= 8


@pytest.mark.slow
@pytest.mark.parametrize(("refusal", "kind"), each_once(["away", "429", "429 for a day", "503"], KINDS))
async def test_nobody_replies_for_as_long_as_the_run_waits(chat_format: ChatTemplate, kind: str, refusal: str) -> None:
    async with one(kind, chat_format, wait=0.3, retries=100) as it:
        await it.ask()
        await it.server.stop()
        if refusal != "away":
            told = "86400" if refusal.endswith("day") else "none"
            await it.start(refuse=3600, status=int(refusal.split()[0]), retry_after=told)
        outcomes = await asyncio.gather(*(it.ask(f"e{number}") for number in range(8)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {OutageError}
        assert {outcome.kind for outcome in outcomes} == {"outage"}  # type: ignore[union-attr]
        assert "`backend.wait`" in str(outcomes[0])


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
async def test_one_request_that_is_always_refused_fails_alone(chat_format: ChatTemplate, kind: str) -> None:
    """A server that refuses one prompt and serves the others is there: the run goes on, the one episode fails."""
    async with one(kind, chat_format, wait=0.5) as it:
        handle = it.server.handle

        async def refusing(connection: Any, path: str, body: bytes) -> None:
            if b"[9,9,9]" in body or b"poison" in body:
                await asyncio.sleep(0.02)
                connection.write(b"HTTP/1.1 429 X\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n")
                return
            await handle(connection, path, body)

        it.server.handle = refusing  # type: ignore[method-assign]

        async def others() -> None:
            while True:
                await it.ask("other")

        busy = asyncio.create_task(others())
        poisoned = request([9, 9, 9], episode="p", messages=[Message(role="user", content="poison")])
        with pytest.raises(BackendError) as caught:
            await it.backend.generate(poisoned)
        assert (type(caught.value), caught.value.kind) == (BackendError, "rate_limited")
        assert not busy.done()
        busy.cancel()


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
async def test_a_reply_after_the_first_refusal_leaves_the_outage_to_all_requests(
    chat_format: ChatTemplate, kind: str
) -> None:
    """A slow reply arrives while a first request is refused already, and from then on nobody is served: this is an outage,
    and no request fails alone."""
    async with one(kind, chat_format, wait=0.3) as it:
        handle = it.server.handle
        refused = asyncio.Event()
        replies: list[str] = []

        async def slow_then_refusing(connection: Any, path: str, body: bytes) -> None:
            if path not in ("/generate", "/v1/chat/completions"):
                await handle(connection, path, body)
            elif not replies:
                replies.append(path)
                await refused.wait()
                await asyncio.sleep(0.05)  # the refusal arrives before this reply
                await handle(connection, path, body)
            else:
                connection.write(b"HTTP/1.1 429 X\r\nretry-after: 86400\r\ncontent-length: 0\r\n\r\n")
                refused.set()

        it.server.handle = slow_then_refusing  # type: ignore[method-assign]
        slow = asyncio.create_task(it.ask("slow"))
        while not replies:  # noqa: ASYNC110  (until the server has the request)
            await asyncio.sleep(0.01)
        early = asyncio.create_task(it.ask("early"))
        await slow
        outcomes = await asyncio.gather(early, it.ask("late"), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OutageError] * 2


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
async def test_a_request_that_gets_no_reply_is_sent_again_within_its_time(chat_format: ChatTemplate, kind: str) -> None:
    async with one(kind, chat_format, timeout=60, try_timeout=0.3) as it:
        right = await it.ask()
        handle = it.server.handle
        hung: list[bytes] = []

        async def hanging(connection: Any, path: str, body: bytes) -> None:
            if path in ("/generate", "/v1/chat/completions") and not hung:
                hung.append(body)
                return
            await handle(connection, path, body)

        it.server.handle = hanging  # type: ignore[method-assign]
        assert await it.ask() == right
        assert (len(hung), it.backend.stats()["try_timeouts"]) == (1, 1)


async def test_a_request_that_gets_no_reply_is_sent_to_another_server(chat_format: ChatTemplate) -> None:
    async def never(call: Call) -> None:
        return

    async with cluster(chat_format, 2, timeout=60, try_timeout=0.3, health_timeout=60) as it:
        await it.backend.generate(request())
        own = next(fake for fake in it.fakes if fake.requests)
        other = next(fake for fake in it.fakes if not fake.requests)
        own.faults.append(never)
        await it.backend.generate(request())
        assert (own.requests, other.requests) == (2, 1)
        async with asyncio.timeout(60):
            while not own.aborted:  # noqa: ASYNC110  (it is told in the background)
                await asyncio.sleep(0.01)
        assert [server["healthy"] for server in it.counts["servers"]] == [True, True]  # it answered when it was asked


async def test_one_of_two_servers_rests_and_the_other_is_asked(chat_format: ChatTemplate) -> None:
    async def tired(call: Call) -> None:
        call.send(b"HTTP/1.1 429 X\r\nretry-after: 3600\r\ncontent-length: 0\r\n\r\n")

    async with cluster(chat_format, 2, retries=0) as it:
        await it.backend.generate(request())
        own = next(fake for fake in it.fakes if fake.requests)
        other = next(fake for fake in it.fakes if not fake.requests)
        own.faults.append(tired)
        for number in range(6):
            await it.backend.generate(request(episode=f"e{number}"))
            await it.backend.generate(request())
        assert it.counts["outages"] == 0
        assert (own.requests, other.requests) == (2, 12)  # one reply, one refusal, and nothing after it


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_frees_who_waits(chat_format: ChatTemplate, kind: str) -> None:
    async with one(kind, chat_format) as it:
        await it.ask()
        await it.server.stop()
        tasks = [asyncio.create_task(it.ask(f"e{number}")) for number in range(4)]
        while not it.backend.outage.waiting:  # noqa: ASYNC110  (it tells nobody)
            await asyncio.sleep(0.01)
        await it.backend.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BackendError}
        assert {outcome.kind for outcome in outcomes} <= {"closed", "unreachable"}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_there_at_the_start_is_told_at_once(chat_format: ChatTemplate, kind: str) -> None:
    made = One(kind, chat_format)
    await made.start()
    await made.server.stop()
    began = time.monotonic()
    with pytest.raises(OutageError) as caught:
        await made.open()
    assert caught.value.kind == "unreachable"
    assert time.monotonic() - began < 60  # and not `backend.wait`
    await made.backend.close()


# -- the parts


async def test_clocks_stand_still_while_the_gate_is_closed() -> None:
    outage = Outage(600)
    clocks = PausableClocks()
    outage.clocks.add(clocks)
    with outage.clocks.timeout(0.05), clocks.timeout(0.05):
        outage.close("gone")
        await asyncio.sleep(0.2)  # longer than both
        outage.open()

    async def too_long() -> None:
        with clocks.timeout(0.02):
            outage.close("gone")
            outage.open()
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await too_long()


async def test_an_outage_goes_on_until_a_reply_however_often_the_gate_opens() -> None:
    outage = Outage(600)
    outage.rest("no", 0.01)
    since = outage.since
    await outage.wait()
    assert (outage.closed, outage.since) == (False, since)
    outage.rest("no", 0.01)
    await outage.wait()
    assert outage.since == since
    outage.served()
    assert outage.since is None
    outage.rest("no", 0.01)
    assert outage.since != since
    outage.end()
