"""A blocked event loop is replaced: which calls are repeated, whom the loss is blamed on, and whose time does not count."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from slow_cases import slow_after, slow_but, slow_but_each

from engine.actions.calling import code_loop as code_loop_module
from engine.actions.calling.code_call import SCOPE, CodeCall, EpisodeScope, LoopReplacedError, call_spec_code
from engine.actions.calling.code_loop import MAX_LOOPS, CodeLoop, CodeLoops
from engine.actions.calling.interrupt import Interrupter
from engine.actions.calling.workers import Workers
from engine.errors import SpecCodeError


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Neighbour:
    """Its calls never end on a loop that another call blocks; the next one does."""

    def __init__(self) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.waits = threading.Event()

    async def ask(self) -> int:
        self.loops.append(asyncio.get_running_loop())
        if len(self.loops) == 1:
            self.waits.set()
            await asyncio.Event().wait()
        return len(self.loops)

    def function(self) -> Callable[[], Awaitable[int]]:
        async def plain() -> int:
            return await self.ask()

        return plain


def task(workers: Workers, function: Any, episode: str, *, last: bool = False, **options: Any) -> asyncio.Task[Any]:
    """A call of an episode, in a task of its own."""

    async def run() -> Any:
        SCOPE.set(EpisodeScope(episode, last=last))
        given: dict[str, Any] = {"seconds": 600.0, "blame": "user", "what": f"`{episode}`.call"} | options
        return await call_spec_code(workers, function, **given)

    return asyncio.create_task(run())


async def block(workers: Workers, release: threading.Event, begun: threading.Event) -> None:
    """Block the loop until it is replaced, by a call of episode `bad/0`."""

    async def blocks() -> None:
        release.wait()

    assert await asyncio.to_thread(begun.wait, 60)
    with pytest.raises(SpecCodeError) as caught:
        await task(workers, blocks, "bad/0", seconds=0.02, blame="tool")
    assert (caught.value.kind, caught.value.blame) == ("tool_timeout", "tool"), "its own episode: by its deadline"


@pytest.mark.parametrize("effects", slow_but(["pure", "replayable"], "replayable"))
async def test_a_function_is_repeated_by_itself_on_another_loop(
    effects: str, workers: Workers, release: threading.Event
) -> None:
    neighbour = Neighbour()
    call = task(workers, neighbour.function(), "good/0", effects=effects)
    await block(workers, release, neighbour.waits)
    assert await call == 2
    first, second = neighbour.loops
    assert first is not second


@pytest.mark.parametrize(
    ("bound", "effects", "last", "repeatable"),
    slow_but_each(
        3,
        [
            (True, "pure", False, True),
            (True, "replayable", False, True),
            (True, "external", False, False),
            (True, "replayable", True, False),
            (False, "external", False, False),
        ],
        several=True,
    ),
)
async def test_what_is_not_repeated_fails_with_the_blame_on_the_call_that_blocked(
    bound: bool, effects: str, last: bool, repeatable: bool, workers: Workers, release: threading.Event
) -> None:
    neighbour = Neighbour()
    function = neighbour.ask if bound else neighbour.function()
    call = task(workers, function, "good/0", effects=effects, last=last)
    await block(workers, release, neighbour.waits)
    with pytest.raises(LoopReplacedError) as caught:
        await call
    error = caught.value
    assert (error.kind, error.blame, error.repeatable) == ("loop_replaced", "tool", repeatable)
    assert error.blocker is not None
    assert (error.blocker.what, error.blocker.episode) == ("`bad/0`.call", "bad/0")
    assert str(error).startswith("`bad/0`.call of episode bad/0 blocked the event loop that `good/0`.call uses")
    assert len(neighbour.loops) == 1, "it is made once"


async def test_an_object_whose_loop_is_gone_is_not_called_on_another(
    workers: Workers, release: threading.Event
) -> None:
    scope = EpisodeScope("good/0")
    SCOPE.set(scope)
    neighbour = Neighbour()
    neighbour.loops.append(asyncio.get_running_loop())  # so that its calls end
    options: dict[str, Any] = {"seconds": 600.0, "blame": "user", "what": "user"}
    assert await call_spec_code(workers, neighbour.ask, **options) == 2
    code_loop = scope.code_loop
    assert code_loop is not None
    begun = threading.Event()
    begun.set()
    await block(workers, release, begun)
    while not code_loop.retired:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(LoopReplacedError) as caught:
        await call_spec_code(workers, neighbour.ask, **options)
    assert caught.value.blocker is code_loop.blocker is not None
    assert caught.value.repeatable
    assert len(neighbour.loops) == 2


@pytest.mark.parametrize("leaves", slow_after(1, ["task", "callback"]))
async def test_what_a_call_left_behind_is_attributed_to_it(
    leaves: str, workers: Workers, release: threading.Event
) -> None:
    neighbour = Neighbour()
    call = task(workers, neighbour.ask, "good/0")
    assert await asyncio.to_thread(neighbour.waits.wait, 60)

    async def later() -> None:
        release.wait()

    async def leaves_behind() -> None:
        loop = asyncio.get_running_loop()
        if leaves == "task":
            neighbour.kept = loop.create_task(later())  # type: ignore[attr-defined]
        else:
            loop.call_later(0.01, release.wait)

    await task(workers, leaves_behind, "bad/0", blame="environment")
    with pytest.raises(LoopReplacedError) as caught:
        await call
    assert caught.value.blocker is not None
    assert (caught.value.blocker.episode, caught.value.blame) == ("bad/0", "environment")


async def test_what_no_call_is_known_for_is_blamed_on_nobody_else(
    workers: Workers, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_loop_module, "UNKNOWN_SECONDS", 0.0)
    neighbour = Neighbour()
    call = task(workers, neighbour.ask, "good/0")
    assert await asyncio.to_thread(neighbour.waits.wait, 60)
    neighbour.loops[0].call_soon_threadsafe(release.wait, context=contextvars.Context())
    with pytest.raises(LoopReplacedError, match="code of an unknown call blocked") as caught:
        await call
    assert (caught.value.blocker, caught.value.blame) == (None, "user")


@pytest.mark.slow
async def test_the_time_for_which_others_block_the_loop_does_not_count(
    workers: Workers, release: threading.Event
) -> None:
    begun = threading.Event()
    go_on: list[int] = []

    async def victim() -> str:
        begun.set()
        while not go_on:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return "in time"

    async def blocks() -> None:
        release.wait()

    call = task(workers, victim, "good/0", seconds=1.0)
    assert await asyncio.to_thread(begun.wait, 60)
    blocker = task(workers, blocks, "slow/0")
    await asyncio.sleep(2.5)  # two deadlines and more
    assert not call.done()
    go_on.append(1)
    release.set()
    assert await call == "in time"
    await blocker


async def test_the_time_for_which_a_call_blocks_its_loop_itself_counts() -> None:
    code_loop = CodeLoop(lambda code_loop: None, Interrupter())
    blocker, other = (CodeCall(asyncio.sleep, (0,), None, "c", "tool") for _ in range(2))
    blocker.began = other.began = 0.0
    code_loop.blocked, blocker.blocking = 5.0, 5.0
    assert code_loop.remaining(other, 1.0) - code_loop.remaining(blocker, 1.0) == pytest.approx(5.0, abs=0.1)
    code_loop.close()


async def test_a_call_that_has_finished_is_not_lost_with_its_loop() -> None:
    code_loop = CodeLoop(lambda code_loop: None, Interrupter())
    finished, running = (CodeCall(asyncio.sleep, (0,), None, "c", "tool") for _ in range(2))
    code_loop._calls = {finished: None, running: None}
    assert finished.take()
    code_loop.close()
    assert code_loop.drop() == 1
    assert (finished.delivered, finished.lost) == (True, False)
    assert (running.delivered, running.lost) == (False, True)


async def test_the_number_of_loops_grows_with_each_replacement() -> None:
    code_loops, counts = CodeLoops(Interrupter()), []
    for _ in range(5):
        counts.append(code_loops._most)
        code_loops._replace(code_loops.choose(EpisodeScope("e/0")))
    assert counts == [1, 4, 16, 64, MAX_LOOPS]
    assert len({id(code_loops.choose(EpisodeScope(f"{n}/0"))) for n in range(40)}) > 8, "episodes are spread over them"
    code_loops.close()


MARK: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")


async def test_calls_that_do_not_wait_share_a_task_and_no_context(workers: Workers) -> None:
    async def mark(name: str) -> tuple[int, str]:
        before = MARK.get()
        MARK.set(name)
        return id(asyncio.current_task()), before

    answers = await asyncio.gather(*(task(workers, partial(mark, f"{n}"), f"{n}/0") for n in range(8)))
    assert {before for _, before in answers} == {"none"}
    assert len({own for own, _ in answers}) == 1


async def test_a_call_that_waits_keeps_its_task_and_its_context_and_the_rest_runs(workers: Workers) -> None:
    goes_on = asyncio.Event()

    async def waits() -> tuple[int, int, str]:
        MARK.set("waits")
        first = id(asyncio.current_task())
        await asyncio.wait_for(goes_on.wait(), 60)
        return first, id(asyncio.current_task()), MARK.get()

    async def runs() -> tuple[int, str]:
        goes_on.set()
        return id(asyncio.current_task()), MARK.get()

    (first, second, mark), (other, other_mark) = await asyncio.gather(
        task(workers, waits, "a/0"), task(workers, runs, "b/0")
    )
    assert (first == second, other == first, mark, other_mark) == (True, False, "waits", "none")


async def test_a_call_that_cancels_its_own_task_ends_no_other(workers: Workers) -> None:
    async def cancels(then_waits: bool) -> str:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        if then_waits:
            await asyncio.sleep(0)
        return "went on"

    async def healthy() -> str:
        await asyncio.sleep(0)
        return "healthy"

    functions = [partial(cancels, False), healthy, partial(cancels, True), healthy]
    answers = await asyncio.gather(
        *(task(workers, function, f"{n}/0") for n, function in enumerate(functions)), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["went on", "healthy", "`2/0`.call cancelled itself", "healthy"]


async def test_a_call_that_blocks_after_it_has_waited_is_known(workers: Workers, release: threading.Event) -> None:
    neighbour = Neighbour()
    call = task(workers, neighbour.ask, "good/0")
    assert await asyncio.to_thread(neighbour.waits.wait, 60)

    async def blocks() -> None:
        await asyncio.sleep(0.01)
        release.wait()

    with pytest.raises(SpecCodeError, match="did not answer within"):
        await task(workers, blocks, "bad/0", seconds=0.3, blame="tool")
    with pytest.raises(LoopReplacedError) as caught:
        await call
    assert caught.value.blocker is not None
    assert (caught.value.blocker.episode, caught.value.blame) == ("bad/0", "tool")
