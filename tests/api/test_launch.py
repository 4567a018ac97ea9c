"""Running specs from Python: blocking, in an event loop, interrupted, resumed, and one episode step by step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path

import code_for_tests as spec_code
import pytest

import engine
from engine.schemas.trajectory import Trajectory

ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
REPLIES = [ADD, "It is 41.", "It is 42."]
THREE = {"source": "inline", "rows": [{"id": name} for name in "abc"], "id": "id"}


class Notes:
    """A `Progress` that records its lines for the test."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lines: list[str | None] = []

    def say(self, text: str) -> None:
        self.said.append(text.partition(", ready")[0])

    def warn(self, text: str) -> None:
        self.said.append(text)

    def step(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def watching(self, panel: engine.api.progress.Panel) -> Iterator[None]:
        yield
        self.lines.append((panel.line() or "").partition(" · ")[0])


def test_a_run_gives_its_episodes_and_sums(
    make_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    run = engine.run(make_spec(REPLIES, tasks=THREE), {"rollout.seed": 3}, limit=2, out=tmp_path, progress=notes)
    assert [(episode.id, episode.reward, episode.solved, episode.failure) for episode in run.episodes] == [
        ("a/0", 0.9, True, None),
        ("b/0", 0.9, True, None),
    ]
    assert (run.status, run.summary.episodes, run.summary.mean_reward) == ("done", 2, 0.9)
    assert (run.spec.spec.rollout.seed, run.store.header.overrides) == (3, ["rollout.seed=3", "tasks.limit=2"])
    assert run.result is not None
    assert not run.result.interrupted
    assert notes.said == ["spec: 2 tasks × 1 samples on scripted"]
    assert notes.lines == ["2/2 episodes"]
    assert capsys.readouterr() == ("", "")
    assert engine.open("latest", tmp_path).folder == run.folder == tmp_path / run.id


async def test_in_a_loop_run_has_a_thread_of_its_own(make_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec = engine.load(make_spec(REPLIES))
    blocking = engine.run(spec, out=tmp_path, progress=False)
    awaited = await engine.run_async(spec, out=tmp_path, progress=False)
    assert [run.episodes[0].reward for run in (blocking, awaited)] == [0.9, 0.9]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a program of the foreground: a shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("in_loop", [False, True])
def test_an_interrupt_stops_cleanly_and_is_raised(
    make_spec: Callable[..., Path], tmp_path: Path, in_loop: bool
) -> None:
    spec = make_spec(REPLIES, tasks=THREE, rollout={"live_episodes": 1})

    def interrupt() -> None:
        if spec_code.CALLS["asked"] == 3:  # in the first feedback of the second episode
            spec_code.ON_CALL.clear()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def in_a_loop() -> None:
        engine.run(spec, out=tmp_path, progress=False)

    spec_code.ON_CALL.append(interrupt)
    start = (lambda: asyncio.run(in_a_loop())) if in_loop else partial(engine.run, spec, out=tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt):
        start()
    stopped = engine.open("latest", tmp_path)
    assert stopped.status == "interrupted"
    assert stopped.episodes[0].reward == 0.9
    assert stopped.episodes[2].reward is None
    resumed = engine.run(resume=stopped.folder, progress=False)
    assert (resumed.id, resumed.status) == (stopped.id, "done")
    assert [episode.reward for episode in resumed.episodes] == [0.9, 0.9, 0.9]


async def test_play_yields_each_step_and_the_trajectory(make_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec = make_spec(REPLIES, tasks=THREE)
    steps, ended = [], []
    async for event in engine.play(spec, task="b"):
        if isinstance(event, Trajectory):
            ended.append((event.episode_id, event.outcome.reward))
        else:
            steps.append((event.seq, event.state, event.event, event.dest))
    assert steps == [
        (0, "PENDING", "ready", "GENERATING"),
        (1, "GENERATING", "tool_calls", "AWAITING_TOOL"),
        (2, "AWAITING_TOOL", "results", "GENERATING"),
        (3, "GENERATING", "answered", "AWAITING_USER_FEEDBACK"),
        (4, "AWAITING_USER_FEEDBACK", "feedback", "GENERATING"),
        (5, "GENERATING", "answered", "AWAITING_USER_FEEDBACK"),
        (6, "AWAITING_USER_FEEDBACK", "satisfied", "DONE"),
        (7, "DONE", "", ""),
    ]
    assert ended == [("b/0", 0.9)]
    assert not (tmp_path / "runs").exists()
    async with aclosing(engine.play(spec, out=tmp_path / "runs")) as events:
        await anext(events)
    assert engine.open("latest", tmp_path / "runs").status == "interrupted"
    with pytest.raises(engine.EngineError, match="has no task 'd'; it has 3 tasks"):
        await anext(engine.play(spec, task="d"))


def test_what_cannot_be_run_is_refused(make_spec: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a spec, or a run to resume"):
        engine.run(progress=False)
    spec = make_spec(REPLIES, user={"use": "code_for_tests:Nobody"})
    with pytest.raises(engine.SpecError, match=r"code\.import") as raised:
        engine.run(spec, out=tmp_path / "runs", progress=False)
    assert [item.path for item in raised.value.diagnostics if item.severity == "error"] == [("user", "use")]
    assert not (tmp_path / "runs").exists()
    done = engine.run(make_spec(REPLIES), out=tmp_path / "runs", progress=False)
    with pytest.raises(engine.EngineError, match=r"a resumed run cannot change `user\.use`"):
        engine.run(resume=done.folder, overrides={"user.use": "code_for_tests:Board"}, progress=False)
