"""Calls into other people's code: threads, deadlines, and what hangs."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import partial

import pytest

from engine.actions.calling.code_call import CodeCall, call_spec_code, on_main_loop
from engine.actions.calling.workers import Workers
from engine.errors import SpecCodeError


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


async def ask(workers: Workers, function, *args, seconds=5.0):
    return await call_spec_code(workers, function, *args, seconds=seconds, blame="tool", what="tool `t`")


async def test_plain_functions_run_in_another_thread(workers: Workers) -> None:
    assert await ask(workers, threading.get_ident) != threading.get_ident()


async def test_async_functions_run_on_one_loop_in_another_thread(workers: Workers) -> None:
    async def where() -> tuple[int, asyncio.AbstractEventLoop]:
        return threading.get_ident(), asyncio.get_running_loop()

    thread, loop = await ask(workers, where)
    assert thread != threading.get_ident()
    assert await ask(workers, where) == (thread, loop)


async def test_calls_are_freed_without_the_collector(workers: Workers) -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    async def answers() -> None:
        return None

    gc.collect()
    gc.disable()
    try:
        for function in (int, answers, waits) * 3:
            await call_spec_code(workers, function, seconds=5.0, blame="tool", what="freed")
        calls = [value for value in gc.get_objects() if isinstance(value, CodeCall) and value.what == "freed"]
    finally:
        gc.enable()
    assert len(calls) <= 2  # the newest of each kind of thread


async def test_functions_of_the_engine_run_on_the_main_loop(workers: Workers) -> None:
    class Ours:
        @on_main_loop
        async def where(self, n: int = 0) -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

        @on_main_loop
        async def __call__(self) -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

    here = asyncio.get_running_loop()
    assert await ask(workers, Ours().where) is here
    assert await ask(workers, partial(Ours().where, n=1)) is here
    assert await ask(workers, Ours()) is here


async def test_a_function_of_the_engine_has_a_deadline_and_its_own_timeouts_are_its_own(workers: Workers) -> None:
    @on_main_loop
    async def waits() -> None:
        await asyncio.sleep(60)

    @on_main_loop
    async def raises() -> None:
        raise TimeoutError("its own")

    with pytest.raises(SpecCodeError) as caught:
        await ask(workers, waits, seconds=0.01)
    assert caught.value.kind == "tool_timeout"
    with pytest.raises(SpecCodeError, match="its own") as caught:
        await ask(workers, raises)
    assert caught.value.kind == "tool_error"


async def test_objects_with_an_async_call_are_awaited(workers: Workers) -> None:
    class Tool:
        async def __call__(self, n: int) -> int:
            return n + 1

    assert await ask(workers, Tool(), 3) == 4
    assert await ask(workers, partial(Tool(), n=3)) == 4


async def test_keyword_arguments_reach_the_function(workers: Workers) -> None:
    def subtract(seconds: int, what: int) -> int:
        return seconds - what

    assert await ask(workers, partial(subtract, what=2, seconds=10)) == 8


async def test_hung_threads_are_replaced_and_hold_no_slot(workers: Workers) -> None:
    release = threading.Event()
    for _ in range(5):  # more than the pool's two threads
        with pytest.raises(SpecCodeError) as caught:
            await ask(workers, release.wait, seconds=0.02)
        assert (caught.value.kind, caught.value.blame) == ("tool_timeout", "tool")
    assert await ask(workers, lambda: "still alive") == "still alive"
    release.set()


async def test_a_coroutine_that_swallows_cancellation_is_left_behind(workers: Workers) -> None:
    over = threading.Event()

    async def stubborn() -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    with pytest.raises(SpecCodeError) as caught:
        await ask(workers, stubborn, seconds=0.05)
    assert caught.value.kind == "tool_timeout"
    over.set()


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), StopIteration(3), SystemExit(2)])
async def test_what_is_raised_becomes_a_typed_error(workers: Workers, error: BaseException) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(SpecCodeError) as caught:
        await ask(workers, raises)
    assert (caught.value.kind, caught.value.blame) == ("tool_error", "tool")
    assert "tool `t` raised" in str(caught.value)
    assert "raises" in (caught.value.trace or "")


async def test_sys_exit_in_a_coroutine_ends_nothing_else(workers: Workers) -> None:
    async def leave() -> None:
        sys.exit(3)

    with pytest.raises(SpecCodeError):
        await ask(workers, leave)
    assert await ask(workers, lambda: 1) == 1


async def test_cancelling_the_caller_cancels_the_call(workers: Workers) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(ask(workers, waits, seconds=60))
    assert await asyncio.to_thread(started.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(cancelled.wait, 60)


async def test_no_more_threads_than_allowed_run_at_once() -> None:
    pool = Workers(3)
    lock = threading.Lock()
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*(ask(pool, work) for _ in range(30)))
    assert most == 3
    pool.close()


async def test_the_deadline_begins_when_a_thread_begins(workers: Workers) -> None:
    pool = Workers(1)
    block = threading.Event()
    first = asyncio.create_task(ask(pool, block.wait, seconds=60))
    second = asyncio.create_task(ask(pool, lambda: "begun", seconds=0.01))
    await asyncio.sleep(0.1)  # ten deadlines: none of them has begun
    assert not second.done()
    block.set()
    assert await second == "begun"
    await first
    pool.close()


async def test_a_call_that_waits_is_run_by_the_thread_that_replaces_a_hung_one() -> None:
    pool = Workers(1)
    block = threading.Event()
    first = asyncio.create_task(ask(pool, block.wait, seconds=0.05))
    second = asyncio.create_task(ask(pool, lambda: "begun", seconds=60))
    with pytest.raises(SpecCodeError):
        await first
    assert await second == "begun"
    block.set()
    pool.close()


async def test_a_call_cancelled_while_it_waits_for_a_thread_never_runs() -> None:
    pool = Workers(1)
    block, ran = threading.Event(), []
    first = asyncio.create_task(ask(pool, block.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(ask(pool, ran.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    block.set()
    await first
    assert await ask(pool, lambda: list(ran)) == []
    pool.close()


async def test_the_callers_context_is_seen_and_not_changed(workers: Workers) -> None:
    seen: ContextVar[int] = ContextVar("seen", default=0)

    async def remembers() -> int:
        before = seen.get()
        seen.set(7)
        return before

    seen.set(3)
    assert await ask(workers, remembers) == 3
    assert await ask(workers, seen.get) == 3
    assert seen.get() == 3


async def test_a_call_that_cancels_its_task_fails_alone(workers: Workers) -> None:
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(SpecCodeError, match="cancelled itself"):
        await ask(workers, cancels)
    assert await ask(workers, lambda: 1) == 1


async def test_a_failure_that_a_call_raises_is_raised_as_it_is(workers: Workers) -> None:
    failure = SpecCodeError("no", blame="user", kind="mine")

    async def fails() -> None:
        raise failure

    with pytest.raises(SpecCodeError) as caught:
        await ask(workers, fails)
    assert caught.value is failure
    assert caught.value.__cause__ is None
