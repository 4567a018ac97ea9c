"""Fake SGLang servers and the backend that talks to them, for tests in one process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.generation import SamplingParams
from engine.tokens.experts import ExpertLayout
from engine.tokens.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from fake_sglang import Call, FakeSGLang

OUTPUT = [5, 6, 7, 8, 2]


class Cluster:
    def __init__(self, fakes: list[FakeSGLang], urls: list[str], backend: SGLangBackend) -> None:
        self.fakes = fakes
        self.fake = fakes[0]
        self.urls = urls
        self.backend = backend

    async def healed(self) -> None:
        """Wait until the first server is used again."""
        async with asyncio.timeout(10):
            while not self.counts["servers"][0]["healthy"]:  # noqa: ASYNC110  (the pool tells nobody)
                await asyncio.sleep(0.02)

    @property
    def counts(self) -> dict[str, Any]:
        return self.backend.stats()


@asynccontextmanager
async def cluster(
    format: ChatTemplate,
    servers: int = 1,
    *,
    sampling: SamplingParams | None = None,
    start: bool = True,
    layout: ExpertLayout | None = None,
    **spec: Any,
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        fakes, urls = [], []
        for _ in range(servers):
            fake = FakeSGLang(output=OUTPUT)
            fake.tokenize = format.encode
            urls.append(await fake.start())
            stack.push_async_callback(fake.stop)
            fakes.append(fake)
        backend = SGLangBackend(
            SGLangBackendSpec.model_validate({"urls": urls, "timeout": 20, **spec}),
            format,
            sampling=sampling or SamplingParams(),
            model="fake",
            layout=layout,
        )
        stack.push_async_callback(backend.close)
        if start:
            await backend.start()
            for fake in fakes:
                fake.requests = 0
        yield Cluster(fakes, urls, backend)


def answers(body: bytes, status: int = 200) -> Callable[[Call], Any]:
    async def fault(call: Call) -> None:
        call.answer(body, status)

    return fault


def changed(**changes: Any) -> Callable[[Call], Any]:
    async def fault(call: Call) -> None:
        call.answer(call.reply(**changes))

    return fault
