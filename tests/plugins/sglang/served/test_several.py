"""Two real servers, one of which is killed; and the router in front of one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from generate_requests import generate_request
from server_load import aborted, until_samples, until_works_on

from engine.errors import BackendError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.tokens.template import ChatTemplate

pytestmark = pytest.mark.slow
HOT = SamplingParams(temperature=1.0, ignore_eos=True)
Running = Any


def request(number: int, **changes: Any) -> GenerateRequest:
    # long enough that a busy machine cannot sample all of it between the look at the server's load and its kill
    fields = {"max_new_tokens": 1500, "seed": number} | changes
    return generate_request([number + 3, 20, 30], HOT, episode=f"e{number}", **fields)


@pytest.mark.exhaustive
async def test_a_server_killed_in_the_middle_loses_no_reply_and_none_is_counted_twice(
    sglang_server: Running, second_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path
) -> None:
    alone = SGLangBackend(
        SGLangBackendSpec(urls=[sglang_server.url]), chat_format, sampling=HOT, model=str(tiny_model_dir)
    )
    await alone.start()
    expected = [(await alone.generate(request(number))).output_ids.tolist() for number in range(4)]
    await alone.close()

    spec = SGLangBackendSpec(urls=[second_server.url, sglang_server.url])
    backend = SGLangBackend(spec, chat_format, sampling=HOT, model=str(tiny_model_dir))
    await backend.start()
    tasks = [asyncio.create_task(backend.generate(request(number))) for number in range(4)]
    await until_samples(backend, 20, requests=2, url=second_server.url)
    second_server.kill()
    generations = await asyncio.gather(*tasks)
    stats = backend.stats()
    await backend.close()

    # a request's seed decides what is sampled, so the reply is the same whichever server gave it
    assert [generation.output_ids.tolist() for generation in generations] == expected
    assert (stats["turns"], stats["tokens"], stats["failovers"]) == (4, 6000, 2)
    assert stats["certificate"] == {"turns_checked": 4, "turns_unchecked": 0, "prompt_mismatches": 0}
    assert [server["healthy"] for server in stats["servers"]] == [False, True]
    assert [server["in_flight"] for server in stats["servers"]] == [0, 0]


@contextmanager
def router_before(worker: str, python: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]), str(other.getsockname()[1])]
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--worker-urls", worker, "--policy", "cache_aware", "--prometheus-port", ports[1]]
    stand_ins = Path(__file__).parents[4] / "scripts" / "sglang_cpu"  # the router's launcher imports SGLang
    environment = {**os.environ, "PYTHONPATH": str(stand_ins), "SGLANG_USE_CPU_ENGINE": "1"}
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


async def routed(backend: SGLangBackend) -> None:
    """Start, as soon as the router is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await backend.start()
            except BackendError as error:
                if error.kind not in ("unreachable", "http_503", "wrong_server"):
                    raise
                await asyncio.sleep(0.5)


async def test_what_a_router_drops_is_found_and_told(
    sglang_server: Running, chat_format: ChatTemplate, tiny_model_dir: Path, router_python: Path, tmp_path: Path
) -> None:
    with router_before(sglang_server.url, router_python, tmp_path) as url:
        spec = SGLangBackendSpec(urls=[url], router=True)
        backend = SGLangBackend(spec, chat_format, sampling=HOT, model=str(tiny_model_dir))
        await routed(backend)
        assert backend.dropped == ["custom_params", "logit_bias", "return_prompt_token_ids", "stop_regex"]
        assert [worker.url for worker in backend.pool.workers] == [sglang_server.url]
        generation = await backend.generate(request(0, max_new_tokens=20))
        assert len(generation.output_ids) == 20
        assert backend.stats()["certificate"] == {"turns_checked": 0, "turns_unchecked": 1, "prompt_mismatches": 0}

        with pytest.raises(BackendError, match="the router drops logit_bias"):
            await backend.generate(request(0, banned_token_ids=[5]))

        task = asyncio.create_task(backend.generate(request(1, max_new_tokens=3500)))
        before = aborted(sglang_server.url)
        for count in (1, 0):  # abort and load go to the worker itself: the router knows neither
            await until_works_on(backend, count)
            task.cancel()
        assert aborted(sglang_server.url) == before + 1
        await backend.close()

        sampling = SamplingParams(stop_regex=["a+"])
        other = SGLangBackend(spec, chat_format, sampling=sampling, model=str(tiny_model_dir))
        with pytest.raises(BackendError, match="the router does not pass on stop_regex, which this spec sets"):
            await other.start()
        await other.close()
