"""Pushes by broadcasts to servers that join with gloo: the order of calls, ranks, and what becomes of a server that hangs or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
from generate_requests import generate_request as request
from joined_sglang import JoinedSGLang
from slow_cases import slow_after
from test_push_outages import Policy

from engine.errors import TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights import sync_collective
from engine.plugins.weights.sync_collective import CollectiveSync
from engine.schemas.generation import SamplingParams
from engine.tokens.template import ChatTemplate

PUSH = ["/end_weight_update", "/begin_weight_update", *["/update_weights_from_distributed"] * 2, "/end_weight_update"]
JOIN = ["/destroy_weights_update_group", "/init_weights_update_group"]


class Weights(Policy):
    """Two buckets of 40 bytes at most."""

    device = torch.device("cpu")

    def __init__(self, start: float = 0.0) -> None:
        self.start = start

    def serving_weights(self) -> dict[str, torch.Tensor]:
        return {
            "a": torch.arange(6.0).reshape(2, 3) + self.start,
            "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16) + self.start,
            "c": torch.arange(8.0).reshape(4, 2).t() - self.start,
        }


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_collective, "BUCKET_BYTES", 40)
    monkeypatch.setattr(sync_collective, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(sync_collective, "BUCKET_SECONDS", 2.0)
    monkeypatch.setattr(sync_collective, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(sync_collective, "BROADCAST_SECONDS", 1.0)
    monkeypatch.setattr(sync_collective, "JOIN_SECONDS", 5.0)
    monkeypatch.setattr(sync_collective, "JOIN_SECONDS", 5.0)


@asynccontextmanager
async def joined(format: ChatTemplate, *servers: JoinedSGLang) -> AsyncIterator[tuple[SGLangBackend, CollectiveSync]]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        urls = []
        for server in servers:
            server.tokenize = format.encode
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        spec = SGLangBackendSpec.model_validate({"urls": urls, "timeout": 20, "wait": 30})
        backend = SGLangBackend(spec, format, sampling=SamplingParams(), model="fake")
        stack.push_async_callback(backend.close)
        await backend.start()
        yield backend, CollectiveSync(backend, "retract", None, None)


def assert_has(server: JoinedSGLang, policy: Weights, version: int) -> None:
    """Every process of the server has these weights."""
    assert server.weight_version == str(version)
    for weights in server.weights:
        wanted = policy.serving_weights()
        assert list(weights) == list(wanted)
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
        assert [tensor.dtype for tensor in weights.values()] == [tensor.dtype for tensor in wanted.values()]
    assert not server.session
    assert not server.paused
    assert server.wrong == []


async def test_all_processes_of_all_servers_get_the_weights_and_the_group_stays(chat_format: ChatTemplate) -> None:
    servers = [JoinedSGLang(2), JoinedSGLang()]
    async with joined(chat_format, *servers) as (backend, sync):
        for version in (1, 2):
            pushed = await sync.push(Weights(version), version)  # type: ignore[arg-type]
            assert pushed.bytes == 24 + 4 + 32
            for server in servers:
                assert_has(server, Weights(version), version)
        assert [server.paths for server in servers] == [JOIN + PUSH + PUSH] * 2
        assert {server.version for server in backend.pool.workers} == {"2"}
        await backend.close()
        assert [server.paths[-1] for server in servers] == [JOIN[0]] * 2
        assert [server.groups for server in servers] == [{}, {}]


async def test_the_group_and_the_session_of_a_killed_trainer_are_ended_first(chat_format: ChatTemplate) -> None:
    server = JoinedSGLang()
    async with joined(chat_format, server) as (backend, sync):
        await sync.push(Weights(), 1)  # type: ignore[arg-type]
        server.session = True
        again = CollectiveSync(backend, "retract", None, None)  # the group of `sync` is still in the server
        await again.push(Weights(2.0), 2)  # type: ignore[arg-type]
        assert_has(server, Weights(2.0), 2)


@pytest.mark.slow  # by default: a server that refuses, below, and lost servers in test_push_outages.py
@pytest.mark.parametrize(
    ("bucket", "place"),
    [(1, "hang_at"), (2, "hang_at"), (1, "hang_after"), (2, "hang_after")],
)
async def test_a_server_that_hangs_is_left_out_until_the_next_push(
    chat_format: ChatTemplate, bucket: int, place: str
) -> None:
    servers = [JoinedSGLang(), JoinedSGLang()]
    async with joined(chat_format, *servers) as (backend, sync):
        await sync.push(Weights(), 1)  # type: ignore[arg-type]
        setattr(servers[1], place, servers[1].broadcasts + bucket)
        await sync.push(Weights(2.0), 2)  # type: ignore[arg-type]
        assert_has(servers[0], Weights(2.0), 2)
        assert [server.healthy for server in backend.pool.workers] == [True, False]
        for number in range(3):
            reply = await backend.generate(request(episode=f"e{number}"))
            assert [span.version for span in reply.versions] == [2]

        await servers[1].revive()
        await sync.push(Weights(3.0), 3)  # type: ignore[arg-type]
        for server in servers:
            assert_has(server, Weights(3.0), 3)
        while not backend.pool.workers[1].healthy:  # noqa: ASYNC110  the pool has no event for that
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "path", slow_after(1, ["/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"])
)
async def test_a_server_that_refuses_twice_ends_the_push_with_its_words(chat_format: ChatTemplate, path: str) -> None:
    servers = [JoinedSGLang(), JoinedSGLang()]
    async with joined(chat_format, *servers) as (_, sync):
        servers[1].refuse = path
        with pytest.raises(TrainError, match=r"version 1 did not reach every server: .*refused") as caught:
            await sync.push(Weights(), 1)  # type: ignore[arg-type]
        assert caught.value.kind == "weights_not_taken"
        assert servers[1].paths.count(path) == 2
        assert [server.paused for server in servers] == [False, False]
        assert not servers[0].session


@pytest.mark.parametrize(("key", "name"), [("pp_size", "pipeline"), ("dp_size", "data")])
async def test_layouts_that_sglang_cannot_broadcast_to_are_refused(
    chat_format: ChatTemplate, key: str, name: str
) -> None:
    async with joined(chat_format, JoinedSGLang(**{key: 2})) as (_, sync):
        with pytest.raises(TrainError, match=f"only without {name} parallelism; use `train.weight_sync.method: disk`"):
            await sync.push(Weights(), 1)  # type: ignore[arg-type]
