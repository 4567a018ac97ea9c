"""Requests and tokens a minute, with a clock that the test turns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from api_server import ApiServer
from slow_cases import slow_after
from test_openai import request

from engine.plugins.chat_apis.backend import Pace
from engine.plugins.chat_apis.openai import OpenAIBackend
from engine.plugins.chat_apis.spec import OpenAIBackendSpec
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_minute_s_requests_go_at_once_and_the_others_at_the_rate() -> None:
    clock, sent = Clock(), list[float]()
    pace = Pace(3, None, clock=clock, sleep=clock.sleep)
    for _ in range(5):
        await pace.take(10**9)
        sent.append(round(clock.now, 6))
    assert sent == [0, 0, 0, 20, 40]
    assert pace.waited == pytest.approx(40)


async def test_tokens_count_as_estimated_until_the_api_has_counted_them() -> None:
    clock = Clock()
    pace = Pace(None, 600, clock=clock, sleep=clock.sleep)
    await pace.take(500)
    pace.correct(500, 100)
    await pace.take(500)
    assert clock.now == 0
    pace.correct(500, 700)
    await pace.take(100)
    assert clock.now == pytest.approx(30)


async def test_a_request_larger_than_a_minute_s_tokens_goes_alone() -> None:
    clock = Clock()
    pace = Pace(None, 60, clock=clock, sleep=clock.sleep)
    await pace.take(180)
    await pace.take(1)
    assert clock.now == pytest.approx(121)


@pytest.mark.parametrize("seed", slow_after(5, range(20)))
async def test_no_time_has_more_than_its_limit(seed: int) -> None:
    chosen, clock = random.Random(seed), Clock()
    requests, tokens = chosen.randrange(1, 30), chosen.randrange(50, 500)
    pace, sent = Pace(requests, tokens, clock=clock, sleep=clock.sleep), list[tuple[float, int]]()
    for _ in range(100):
        clock.now += chosen.random() * 5
        amount = chosen.randrange(1, 50)
        await pace.take(amount)
        sent.append((clock.now, amount))
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            share = 1 + (sent[last][0] - start) / 60 + 1e-6
            assert last - first + 1 <= requests * share
            assert sum(amount for _, amount in sent[first : last + 1]) <= tokens * share


async def test_the_backend_keeps_its_limits_with_the_tokens_that_the_api_counted(tiny_model_dir: Path) -> None:
    clock = Clock()
    with ApiServer() as server:
        spec = OpenAIBackendSpec(url=server.url, model="m", requests_per_minute=3, tokens_per_minute=60)
        backend = OpenAIBackend(spec, load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir))
        backend._pace = Pace(3, 60, clock=clock, sleep=clock.sleep)
        counted = []
        for _ in range(3):
            generation = await backend.generate(request(max_new_tokens=60))
            counted.append(generation.prompt_tokens + generation.sampled_tokens)
        assert clock.now == pytest.approx(sum(counted[:2]))
        assert backend.stats()["paced_seconds"] == round(clock.now, 3)
        await backend.close()
