"""A server that is lost at any byte of a push of weights: the push ends with every used server on the new version, or says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from generate_requests import generate_request as request
from safetensors.torch import save_file
from sglang_cluster import OUTPUT, FakeSGLang
from slow_cases import slow_after

from engine.errors import OutageError, TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.server_pushes import difference
from engine.plugins.weights.sync_sglang import AdapterSync, DiskSync
from engine.schemas.generation import SamplingParams
from engine.tokens.template import ChatTemplate

Death = Literal["for good", "restarted", "connection"]


class Proxy:
    """Passes bytes to a fake server until `most` bytes have passed, in both directions together; then it dies as told."""

    def __init__(self, fake: FakeSGLang, death: Death) -> None:
        self.fake = fake
        self.death = death
        self.passed = 0
        self.most: int | None = None
        self.died = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._target = int((await self.fake.start()).rpartition(":")[2])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        with suppress(OSError):
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            room = len(data) if self.most is None or self.died else self.most - self.passed
            writer.write(data[:room])
            self.passed += len(data[:room])
            if room < len(data):
                self._die()
        writer.close()

    def _die(self) -> None:
        self.died = True
        for writer in self._writers:
            writer.transport.abort()
        if self.death != "connection":
            self._server.close()
        if self.death == "restarted":
            self.fake.weight_version = "default"
            self.fake.paused = False
            task = asyncio.ensure_future(self._restart())
            self._tasks.add(task)

    async def _restart(self) -> None:
        await asyncio.sleep(0.02)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self.fake.stop()


@asynccontextmanager
async def served(
    format: ChatTemplate, servers: int, death: Death, **spec: Any
) -> AsyncIterator[tuple[SGLangBackend, list[Proxy]]]:
    async with AsyncExitStack() as stack:
        proxies, urls = [], []
        for _ in range(servers):
            fake = FakeSGLang(output=OUTPUT)
            fake.tokenize = format.encode
            proxies.append(Proxy(fake, death))
            urls.append(await proxies[-1].start())
            stack.push_async_callback(proxies[-1].stop)
        backend = SGLangBackend(
            SGLangBackendSpec.model_validate({"urls": urls, "timeout": 20, **spec}),
            format,
            sampling=SamplingParams(),
            model="fake",
        )
        stack.push_async_callback(backend.close)
        await backend.start()
        yield backend, proxies


class Policy:
    """The files of a policy, without weights: a fake server reads none."""

    net = SimpleNamespace(folder=Path("/nothing"))

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def save(self, folder: Path, *, serving: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def save_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)


def sync_of(kind: str, backend: SGLangBackend, folder: Path) -> Any:
    return DiskSync(backend, folder, "retract") if kind == "disk" else AdapterSync(backend, folder)


async def push_length(format: ChatTemplate, kind: str, folder: Path) -> int:
    """Bytes of an undisturbed push to one of two servers."""
    async with served(format, 2, "for good") as (backend, proxies):
        sync = sync_of(kind, backend, folder)
        await sync.push(Policy(), 1)
        before = proxies[0].passed
        await sync.push(Policy(), 2)
        return proxies[0].passed - before


async def cut_push(format: ChatTemplate, kind: str, folder: Path, servers: int, death: Death, most: int) -> None:
    async with served(format, servers, death, wait=30) as (backend, proxies):
        sync = sync_of(kind, backend, folder)
        await sync.push(Policy(), 1)
        proxies[0].most = proxies[0].passed + most
        async with asyncio.timeout(30):
            await sync.push(Policy(), 2)
            assert proxies[0].died
            # Every request is sampled with version 2, whichever server takes it, and whenever the lost one is back.
            for number in range(3 * servers):
                generation = await backend.generate(request(episode=f"e{number}"))
                assert [span.version for span in generation.versions] == [2], (death, most)
            if death != "for good":
                while not backend.pool.workers[0].healthy:  # noqa: ASYNC110  the pool has no event for that
                    await asyncio.sleep(0.01)
                generation = await backend.generate(request(episode="after"))
                assert [span.version for span in generation.versions] == [2]
                if kind == "adapter":
                    loaded = [
                        body["lora_name"] for path, body in proxies[0].fake.control if path == "/load_lora_adapter"
                    ]
                    assert loaded[-1] == list(backend.control.adapters)[-1]
                paused = [path for path, _ in proxies[0].fake.control if path.endswith("_generation")]
                assert not paused or paused[-1] == "/continue_generation"


@pytest.mark.parametrize("kind", ["disk", "adapter"])
@pytest.mark.parametrize(
    ("servers", "death"),
    slow_after(
        1, [(2, "for good"), (2, "connection"), (1, "connection"), (2, "restarted"), (1, "restarted")], several=True
    ),
)
async def test_a_push_goes_on_when_a_server_is_lost_at_any_place(
    chat_format: ChatTemplate, tmp_path: Path, kind: str, servers: int, death: Death
) -> None:
    length = await push_length(chat_format, kind, tmp_path / "whole")
    places = range(0, length, max(1, length // (12 if death == "for good" else 3)))
    await asyncio.gather(
        *(cut_push(chat_format, kind, tmp_path / f"{place:05d}", servers, death, place) for place in places)
    )


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["disk", "adapter"])
@pytest.mark.parametrize("death", ["for good", "connection", "restarted"])
async def test_a_push_goes_on_when_a_server_is_lost_at_each_byte(
    chat_format: ChatTemplate, tmp_path: Path, kind: str, death: Death
) -> None:
    """A connection ends at each byte. What a server does afterwards depends on less: every fourth byte, from 0 or from 2."""
    length = await push_length(chat_format, kind, tmp_path / "whole")
    first, step = {"connection": (0, 1), "for good": (0, 4), "restarted": (2, 4)}[death]
    places = range(first, length, step)
    for at in range(0, len(places), 32):
        await asyncio.gather(
            *(cut_push(chat_format, kind, tmp_path / f"{place:05d}", 2, death, place) for place in places[at : at + 32])
        )


@pytest.mark.parametrize("kind", slow_after(1, ["disk", "adapter"]))
async def test_without_a_server_a_push_waits_as_long_as_the_spec_says(
    chat_format: ChatTemplate, tmp_path: Path, kind: str
) -> None:
    async with served(chat_format, 1, "for good", wait=0.5) as (backend, proxies):
        sync = sync_of(kind, backend, tmp_path)
        await sync.push(Policy(), 1)
        proxies[0].most = proxies[0].passed + 50
        with pytest.raises(OutageError, match=r"no server took version 2 for 0\.5 s \(`backend\.wait`\)"):
            await sync.push(Policy(), 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"b": torch.zeros(3, 2)}, r"`b` has shape \[3, 2\] there and \[2, 3\] here"),
        ({"b": None}, "it has no weight `b`"),
        ({"c": torch.zeros(1)}, "its weight `c` is not trained or sent"),
        ({"b": torch.zeros(2, 3, dtype=torch.int8)}, "`b` is quantized there and not here"),
        ({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, None),
    ],
)
@pytest.mark.parametrize("kind", ["disk", "adapter"])
async def test_weights_that_do_not_fit_a_server_are_refused_before_they_are_sent(
    chat_format: ChatTemplate, tmp_path: Path, kind: str, change: dict[str, torch.Tensor | None], said: str | None
) -> None:
    own = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    for name, tensors in (("own", own), ("server", {**own, **change})):
        (tmp_path / name).mkdir()
        save_file(
            {key: value for key, value in tensors.items() if value is not None}, tmp_path / name / "model.safetensors"
        )
    policy = Policy()
    policy.net = SimpleNamespace(folder=tmp_path / "own")
    policy.weights = lambda: own  # type: ignore[method-assign]
    async with served(chat_format, 1, "for good") as (backend, proxies):
        proxies[0].fake.model_path = str(tmp_path / "server")
        sync = sync_of(kind, backend, tmp_path / "weights")
        if said is None:
            await sync.push(policy, 1)
            return
        with pytest.raises(TrainError, match=f"another model than the one that is trained: {said}") as caught:
            await sync.push(policy, 1)
        assert caught.value.kind == "weights_not_taken"
        assert proxies[0].fake.control == []


def test_tied_weights_may_be_in_the_files_or_not() -> None:
    facts = {"a": ((2,), True)}
    assert difference(facts, facts | {"lm_head.weight": ((3, 2), True)}) is None
