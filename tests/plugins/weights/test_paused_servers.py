"""A server that is lost while it is paused for a push samples again, and none comes back in the middle of a push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_requests import generate_request as request
from sglang_cluster import OUTPUT, FakeSGLang
from slow_cases import slow_but_each
from test_push_outages import Policy

from engine.errors import BackendError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.sync_sglang import DiskSync, TensorSync
from engine.schemas.generation import SamplingParams
from engine.tokens.template import ChatTemplate


class Server(FakeSGLang):
    """Does what a call to the path `cut` asks for, and drops the connection; waits for `gate` before it pauses."""

    def __init__(self) -> None:
        super().__init__(output=OUTPUT)
        self.cut: str | None = None
        self.gate: asyncio.Event | None = None
        self.pausing = asyncio.Event()

    async def handle(self, connection: Any, path: str, body: bytes) -> None:
        if path == "/pause_generation" and self.gate is not None:
            self.pausing.set()
            await self.gate.wait()
        if path != self.cut:
            await super().handle(connection, path, body)
            return
        self._other(path, body)
        connection.drop()


class Weights(Policy):
    """Two small weights."""

    device = torch.device("cpu")

    def serving_weights(self) -> dict[str, torch.Tensor]:
        return {"a": torch.zeros(3), "b": torch.ones(2)}


@asynccontextmanager
async def two_servers(format: ChatTemplate) -> AsyncIterator[tuple[SGLangBackend, list[Server]]]:
    async with AsyncExitStack() as stack:
        fakes = [Server(), Server()]
        urls = []
        for fake in fakes:
            fake.tokenize = format.encode
            urls.append(await fake.start())
            stack.push_async_callback(fake.stop)
        spec = SGLangBackendSpec.model_validate({"urls": urls, "timeout": 20, "wait": 30})
        backend = SGLangBackend(spec, format, sampling=SamplingParams(), model="fake")
        stack.push_async_callback(backend.close)
        await backend.start()
        yield backend, fakes


@pytest.mark.parametrize(
    ("method", "cut"),
    slow_but_each(
        3,
        [
            ("disk", "/pause_generation"),
            ("disk", "/update_weights_from_disk"),
            ("disk", "/continue_generation"),
            ("tensors", "/pause_generation"),
            ("tensors", "/begin_weight_update"),
            ("tensors", "/update_weights_from_tensor"),
            ("tensors", "/continue_generation"),
        ],
        several=True,
    ),
)
async def test_a_server_that_is_lost_at_a_call_of_a_push_samples_again(
    chat_format: ChatTemplate, tmp_path: Path, method: str, cut: str
) -> None:
    """A paused server fails its health check, so it must be continued before the check."""
    async with asyncio.timeout(30), two_servers(chat_format) as (backend, fakes):
        sync = DiskSync(backend, tmp_path, "retract") if method == "disk" else TensorSync(backend, "retract")
        await sync.push(Weights(), 1)  # type: ignore[arg-type]
        fakes[0].cut = cut
        await sync.push(Weights(), 2)  # type: ignore[arg-type]
        assert backend.pool.workers[0].counts["failed"]
        fakes[0].cut = None
        await sync.push(Weights(), 3)  # type: ignore[arg-type]
        while not backend.pool.workers[0].healthy:  # noqa: ASYNC110  the pool has no event for that
            await asyncio.sleep(0.01)
        assert [fake.paused for fake in fakes] == [False, False]
        assert [fake.weight_version for fake in fakes] == ["3", "3"]
        for number in range(4):
            reply = await backend.generate(request(episode=f"e{number}"))
            assert [span.version for span in reply.versions] == [3]


async def test_no_server_comes_back_in_the_middle_of_a_push(chat_format: ChatTemplate, tmp_path: Path) -> None:
    """It would have the weights that the others are just replacing."""
    async with asyncio.timeout(30), two_servers(chat_format) as (backend, fakes):
        sync = DiskSync(backend, tmp_path, "retract")
        await sync.push(Weights(), 1)  # type: ignore[arg-type]
        away = backend.pool.workers[1]
        fakes[1].down = True
        backend.pool.failed(away, "the test says so")
        fakes[0].gate = asyncio.Event()
        push = asyncio.create_task(sync.push(Weights(), 2))  # type: ignore[arg-type]
        await fakes[0].pausing.wait()
        for call in (backend.control.wake, backend.control.catch_up):
            with pytest.raises(BackendError, match="waits for the end of an update") as caught:
                await call(away)
            assert caught.value.kind == "updating"
        fakes[0].gate.set()
        await push
        fakes[1].down = False
        while not away.healthy:  # noqa: ASYNC110  the pool has no event for that
            await asyncio.sleep(0.01)
        assert [fake.weight_version for fake in fakes] == ["2", "2"]


async def test_a_push_that_begins_while_a_server_comes_back_leaves_it_out(
    chat_format: ChatTemplate, tmp_path: Path
) -> None:
    """Whatever the server loaded until then is not what the others have now."""
    async with asyncio.timeout(30), two_servers(chat_format) as (backend, fakes):
        sync = DiskSync(backend, tmp_path, "retract")
        await sync.push(Weights(), 1)  # type: ignore[arg-type]
        away = backend.pool.workers[1]
        fakes[1].down = True
        backend.pool.failed(away, "the test says so")
        true = away.json

        async def json(method: str, path: str, *rest: Any, **more: Any) -> Any:
            if path == "/model_info":
                away.json = true  # type: ignore[method-assign]
                await sync.push(Weights(), 2)  # type: ignore[arg-type]
            return await true(method, path, *rest, **more)

        away.json = json  # type: ignore[method-assign]
        with pytest.raises(BackendError, match="missed an update") as caught:
            await backend.control.catch_up(away)
        assert caught.value.kind == "updating"


async def test_a_training_continues_servers_that_a_killed_one_left_paused(chat_format: ChatTemplate) -> None:
    """A server that is paused answers no request: not even those of the checks at the start."""
    fake = Server()
    fake.tokenize = chat_format.encode
    fake.paused = True
    spec = SGLangBackendSpec.model_validate({"urls": [await fake.start()], "timeout": 20})
    backend = SGLangBackend(spec, chat_format, sampling=SamplingParams(), model="fake")
    backend.training = True
    try:
        async with asyncio.timeout(20):
            await backend.start()
    finally:
        await backend.close()
        await fake.stop()
    assert not fake.paused
