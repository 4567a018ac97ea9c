"""Busy code past its deadline is ended; code that waits, and everything that is not a spec's code, is left alone."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any

import pytest
from slow_cases import slow_after
from structlog.testing import capture_logs
from waiting import until

from engine.actions.calling import interrupt
from engine.actions.calling.code_call import SCOPE, EpisodeScope, call_spec_code
from engine.actions.calling.interrupt import CodeThread, Interrupted, Interrupter, is_spec_code
from engine.actions.calling.workers import Workers
from engine.environments import tools as shipped
from engine.errors import SpecCodeError

DEADLINE = 0.02


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


async def give_up(workers: Workers, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(SpecCodeError, match="did not answer"):
        await call_spec_code(workers, function, *args, seconds=DEADLINE, blame="tool", what="tool `t`")


def spin() -> None:
    while True:
        pass


def spin_and_retry() -> None:
    while True:
        try:
            spin()
        except Exception:  # noqa: BLE001  (as a spec's code may)
            continue


async def spin_async() -> None:
    spin()


@pytest.mark.parametrize("function", [spin, spin_and_retry, spin_async])
async def test_a_busy_loop_past_its_deadline_is_ended(workers: Workers, function: Callable[[], Any]) -> None:
    before = set(threading.enumerate())
    await give_up(workers, function)
    await until(lambda: workers.interrupter.ended == 1)
    await until(lambda: not [t for t in set(threading.enumerate()) - before if t.name == "episode-worker"])
    assert workers.interrupter.summary == "1 calls kept computing after their deadline: 1 were interrupted"
    assert workers.interrupter.uninterruptible == 0
    assert await call_spec_code(workers, lambda: 1, seconds=60, blame="tool", what="tool `t`") == 1


async def test_code_that_catches_the_interruption_is_interrupted_again(workers: Workers) -> None:
    caught = []

    def stubborn() -> None:
        while len(caught) < 3:
            try:
                spin()
            except Interrupted as error:
                caught.append(type(error))

    await give_up(workers, stubborn)
    await until(lambda: workers.interrupter.ended == 1)
    assert caught == [Interrupted] * 3


async def test_code_that_waits_is_left_alone(workers: Workers) -> None:
    release, ends = threading.Event(), []

    def waits() -> None:
        try:
            release.wait()
            ends.append("returned")
        except BaseException as error:  # noqa: BLE001
            ends.append(repr(error))

    await give_up(workers, waits)
    await give_up(workers, spin)
    await until(lambda: workers.interrupter.ended == 1)  # the watcher has looked at both
    release.set()
    await until(lambda: bool(ends))
    assert ends == ["returned"]
    assert workers.interrupter.ended == 1


def spin_of(module: str) -> Callable[[list[int]], None]:
    """A busy loop whose frame belongs to a module."""
    names: dict[str, Any] = {"__name__": module}
    exec("def spin(stop):\n    while not stop:\n        pass\n", names)
    return names["spin"]


@pytest.mark.parametrize("module", slow_after(1, ["logging", "concurrent.futures.thread", "engine.store.writer"]))
async def test_the_standard_library_and_the_engine_are_never_interrupted(workers: Workers, module: str) -> None:
    stop: list[int] = []
    await give_up(workers, spin_of(module), stop)
    (busy,) = workers.interrupter._threads
    await until(lambda: busy.busy_since is not None)  # seen busy
    await give_up(workers, spin)
    await until(lambda: workers.interrupter.ended == 1)
    assert busy.interruptions == 0
    stop.append(1)
    await until(lambda: not workers.interrupter._threads)
    assert workers.interrupter.ended == 1


def frame_of(module: str) -> FrameType:
    names: dict[str, Any] = {"__name__": module, "sys": sys}
    exec("def frame():\n    return sys._getframe()\n", names)
    return names["frame"]()


@pytest.mark.parametrize(
    ("module", "own"),
    [
        ("my_code", True),
        ("sympy.core.basic", True),
        ("__main__", True),
        (shipped.__name__, True),
        ("engine.actions.calling.workers", False),
        ("engine", False),
        ("importlib._bootstrap", False),
        ("_frozen_importlib", False),
        (logging.__name__, False),
    ],
)
def test_what_is_code_of_a_spec(module: str, own: bool) -> None:
    assert is_spec_code(frame_of(module)) is own


def test_a_thread_that_has_left_the_code_of_others_is_not_watched() -> None:
    interrupter, thread = Interrupter(), CodeThread()
    interrupter.add(thread, None)
    interrupter.release(thread)
    assert not interrupter._threads
    interrupter.add(thread, None)
    assert not interrupter._threads
    assert interrupter.ended == 0


async def test_calls_that_end_while_they_are_interrupted_end_in_order(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes at every place of the way out of the call; no thread dies of it."""
    monkeypatch.setattr(interrupt, "TICK", 0.0005)
    monkeypatch.setattr(interrupt, "BUSY_SECONDS", 0.0)
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def ends_at(when: list[int]) -> None:
        while not when:
            pass

    before = set(threading.enumerate())
    for _ in range(8):
        when: list[int] = []
        await give_up(workers, ends_at, when)
        when.append(1)
    await until(lambda: not [t for t in set(threading.enumerate()) - before if t.name == "episode-worker"])
    assert not died
    assert not workers.interrupter._threads
    assert not workers.interrupter._lock.locked()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_an_exception_is_raised_in_the_code_of_its_call_and_nowhere_else(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Calls end at random moments around their interruption; other calls, plain and `async`, run beside them."""
    monkeypatch.setattr(interrupt, "TICK", 0.0003)
    monkeypatch.setattr(interrupt, "BUSY_SECONDS", 0.0)
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    random = Random(seed)

    def ends_after(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    async def ends_after_async(seconds: float) -> None:
        ends_after(seconds)

    async def late(function: Callable[..., Any], seconds: float) -> None:
        with suppress(SpecCodeError):
            await call_spec_code(workers, function, seconds, seconds=0.002, blame="tool", what="tool `t`")

    async def healthy(number: int) -> int:
        return number

    before = set(threading.enumerate())
    await give_up(workers, spin)
    for _ in range(120):
        numbers = [call_spec_code(workers, abs, -n, seconds=60, blame="tool", what="tool `h`") for n in range(3)]
        numbers += [call_spec_code(workers, healthy, n, seconds=60, blame="tool", what="tool `a`") for n in range(3)]
        calls = [late(random.choice([ends_after, ends_after_async]), random.uniform(0.0, 0.02)) for _ in range(3)]
        assert (await asyncio.gather(*numbers, *calls))[:6] == [0, 1, 2, 0, 1, 2]
    await until(lambda: not workers.interrupter._threads)
    workers.close()
    await until(
        lambda: not [t for t in set(threading.enumerate()) - before if t.name in ("episode-worker", "code-loop")]
    )
    assert not died
    assert workers.interrupter.ended > 0


async def test_what_cannot_be_ended_is_counted_and_reported_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "UNINTERRUPTIBLE_SECONDS", 0.0)
    stop: list[int] = []

    def stubborn() -> None:
        while not stop:
            try:
                while not stop:
                    pass
            except Interrupted:
                continue

    SCOPE.set(EpisodeScope("t3/0"))
    with capture_logs() as logs:
        await give_up(workers, stubborn)
        await until(lambda: workers.interrupter.uninterruptible == 1)
        (busy,) = workers.interrupter._threads
        seen = busy.interruptions
        await until(lambda: busy.interruptions > seen)  # it goes on being interrupted
    assert workers.interrupter.summary == (
        "1 calls kept computing after their deadline: 0 were interrupted, 1 cannot be interrupted and slow down all other calls; "
        "run that code with `isolation: process`"
    )
    (line,) = [line for line in logs if "cannot be interrupted" in line["event"]]
    assert (line["function"], line["episode"]) == ("tool `t`", "t3/0")
    assert "in stubborn" in line["stack"]
    stop.append(1)
    await until(lambda: workers.interrupter.ended == 1)
    assert workers.interrupter.uninterruptible == 0


async def test_without_a_clock_of_its_own_a_thread_is_never_taken_for_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    assert CodeThread().cpu() == 0.0
