"""A run that is stopped at any commit and resumed comes to what it would have come to, and pays nothing twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from ending_marks import marked
from endings import CASES, ONCE, ONE, filled
from journals import write_entries
from slow_cases import slow_after, slow_but
from stopping import Resumed, check, content, lines, undisturbed

from engine.runner.guarded import EpisodeGuard
from engine.schemas.trajectory import Trajectory
from engine.store import RunHeader, RunStore, list_runs
from engine.store.results import EncodedTrajectory

MAX_COMMITS = 60
PAID: dict[str, Any] = {"user": None, "tools": None, "machine": "single_turn", "rewards": ONE}
QUICK = {
    "stopped": ["an external tool"],
    "starved": ["tools and a user, and an environment that scores", "a user that a model plays"],
}
"""Of the cases, those that the default run stops at every commit, by the way of stopping."""


@pytest.mark.parametrize(
    ("case", "way"),
    marked(
        pytest.param(case, way, marks=() if case in QUICK[way] else pytest.mark.slow)
        for case in CASES
        for way in QUICK
        if case != ONCE
    ),
)
async def test_an_episode_stopped_at_any_commit_comes_to_the_same(
    make_spec: Any, tmp_path: Path, case: str, way: str
) -> None:
    wanted, calls = await undisturbed(make_spec, case, tmp_path)
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    resumed = Resumed(make_spec(replies, **changes))
    for commit in range(1, MAX_COMMITS):
        out = tmp_path / str(commit)
        struck = await getattr(resumed, way)(out, commit)
        await check(resumed, out, wanted, calls, log, f"{case}, {way} after commit {commit}")
        if not struck:
            return
    raise AssertionError(f"more than {MAX_COMMITS} commits")


@pytest.mark.parametrize(
    "case",
    marked(slow_but(["score at the end", "a judge", "an external tool"], "score at the end")),
)
async def test_an_episode_killed_after_any_commit_comes_to_the_same(make_spec: Any, tmp_path: Path, case: str) -> None:
    wanted, calls = await undisturbed(make_spec, case, tmp_path)
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    path = make_spec(replies, **changes)
    resumed = Resumed(path)
    server = serving(path)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        for commit in range(1, MAX_COMMITS):
            out = tmp_path / str(commit)
            server.stdin.write(f"{out} {commit}\n".encode())
            server.stdin.flush()
            status = int(server.stdout.readline())
            await check(resumed, out, wanted, calls, log, f"{case}, killed after commit {commit}")
            if status == 0:
                return
            assert status == 9
    finally:
        server.communicate(timeout=30)
    raise AssertionError(f"more than {MAX_COMMITS} commits")


def serving(path: Path) -> subprocess.Popen[bytes]:
    """A process that runs a spec and kills itself: see stopping.py."""
    script = Path(__file__).with_name("stopping.py")
    return subprocess.Popen([sys.executable, str(script), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_a_call_that_may_have_been_made_is_not_made_again_in_its_attempt(make_spec: Any, tmp_path: Path) -> None:
    """Stopped inside of an external call, which is in no journal: the episode begins anew."""
    log = tmp_path / "log"
    replies, changes = filled("an external tool", str(log))
    resumed = Resumed(make_spec(replies, **changes))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def strike() -> None:
        loop.call_soon_threadsafe(stop.set)
        spec_code.GATE.wait(5)  # it has driven, and nobody hears of it

    spec_code.ON_CALL.append(strike)
    await resumed.run(tmp_path / "runs", stop)
    spec_code.GATE.set()
    spec_code.ON_CALL.clear()
    assert lines(log) == ["drove 3"]
    await resumed.run(tmp_path / "runs")
    with resumed.store(tmp_path / "runs") as store:
        (trajectory,) = store.trajectories()
        assert store.episode("a/0").attempt == 1
    assert [message.text for message in trajectory.messages if message.role == "tool"] == ["3", "6"]


async def test_who_waits_to_be_finished_is_finished_when_the_run_is_interrupted(
    make_spec: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("engine.store.writer.FINISHING", 1)
    rows = [{"id": f"t{number}"} for number in range(8)]
    resumed = Resumed(make_spec(["It is 42."], tasks={"rows": rows}, **PAID))
    stop = asyncio.Event()
    judged = EpisodeGuard.judged

    async def slow(*arguments: Any) -> Trajectory:
        while spec_code.CALLS["one"] < 8:  # noqa: ASYNC110  (counted in other threads)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # all wait now, but one
        stop.set()
        await asyncio.sleep(0)
        return await judged(*arguments)

    monkeypatch.setattr(EpisodeGuard, "judged", slow)
    await resumed.run(tmp_path / "runs", stop)
    assert spec_code.CALLS["one"] == 8
    with resumed.store(tmp_path / "runs") as store:
        assert len(store.finished()) == 8


@pytest.mark.parametrize("commits", slow_but([2, 9], 9))
async def test_interrupting_many_episodes_pays_each_final_score_once(
    make_spec: Any, tmp_path: Path, commits: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("engine.store.writer.FINISHING", 4)  # so that many wait to be finished
    rows = [{"id": f"t{number}"} for number in range(80)]
    resumed = Resumed(make_spec(["It is 42."], tasks={"rows": rows}, rollout={"concurrency": 64}, **PAID))
    await resumed.stopped(tmp_path / "runs", commits)
    await resumed.run(tmp_path / "runs")
    with resumed.store(tmp_path / "runs") as store:
        assert Counter(row.reward for row in store.episodes()) == {1.0: 80}
    assert await resumed.differences(tmp_path / "runs") == []


async def copied(resumed: Resumed, source: Path, out: Path) -> None:
    """A run whose end could not be written: the journal has ended, and the episode is not done."""
    with resumed.store(source) as store:
        journal = store.journal("a/0")
        task = store.task("a")
    with RunStore.create(out, RunHeader.of(resumed.loaded)) as store:
        await write_entries(await store.begin(task, 0), *journal)


@pytest.mark.parametrize(
    "case",
    marked(slow_after(
        7,
        ["score at the end", "tools and a user, and an environment that scores", "an external tool", "a judge",
         "nothing handles the failure", "a final state without an action", "the environment is external"],
    )),
)  # fmt: skip
async def test_what_the_journal_says_has_ended_is_only_finished(make_spec: Any, tmp_path: Path, case: str) -> None:
    wanted, _ = await undisturbed(make_spec, case, tmp_path)
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    resumed = Resumed(make_spec(replies, **changes))
    await copied(resumed, tmp_path / "whole", tmp_path / "old")
    spec_code.CALLS.clear()
    result = await resumed.run(tmp_path / "old")
    assert result.faults == []
    with resumed.store(tmp_path / "old") as store:
        (trajectory,) = store.trajectories()
        assert store.episode("a/0").attempt == 0
    assert content(trajectory) == wanted
    assert await resumed.differences(tmp_path / "old") == []
    assert lines(log) == []
    assert {name: count for name, count in spec_code.CALLS.items() if name not in ("built", "closed")} == {}


async def test_an_ended_episode_whose_objects_cannot_be_built_stays_ended(make_spec: Any, tmp_path: Path) -> None:
    case = "tools and a user, and an environment that scores"
    wanted, _ = await undisturbed(make_spec, case, tmp_path)
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    resumed = Resumed(make_spec(replies, **changes))
    await copied(resumed, tmp_path / "whole", tmp_path / "old")
    broken = Resumed(
        make_spec(replies, **{**changes, "environment": {**changes["environment"], "with": {"fail": "build"}}})
    )
    spec_code.CALLS.clear()
    (fault,) = (await broken.run(tmp_path / "old")).faults
    assert "it has ended, but its objects cannot be built to finish it" in fault
    assert spec_code.CALLS == {}
    assert (await resumed.run(tmp_path / "old")).faults == []
    with resumed.store(tmp_path / "old") as store:
        (trajectory,) = store.trajectories()
    assert content(trajectory) == wanted


async def test_an_end_that_cannot_be_written_is_not_performed_again(
    make_spec: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    resumed = Resumed(make_spec(["It is 42."], **PAID))

    def failing(trajectory: Trajectory) -> EncodedTrajectory:
        raise ValueError("no row can be made of it")

    with monkeypatch.context() as patched:
        patched.setattr("engine.store.journal.encode_trajectory", failing)
        (fault,) = (await resumed.run(tmp_path / "runs")).faults
    assert "no row can be made of it" in fault
    assert (await resumed.run(tmp_path / "runs")).faults == []
    assert spec_code.CALLS["one"] == 1
    with resumed.store(tmp_path / "runs") as store:
        assert [row.reward for row in store.episodes()] == [1.0]


async def test_a_journal_that_leads_elsewhere_is_a_fault_of_that_episode_alone(make_spec: Any, tmp_path: Path) -> None:
    """The spec has changed under the journal: nothing is performed, and the other episodes go on."""
    rows = [{"id": "a"}, {"id": "b"}]
    first = Resumed(make_spec(["no", "It is 42."], tasks={"rows": rows}))
    await first.run(tmp_path / "whole")
    with first.store(tmp_path / "whole") as store:
        journal = store.journal("a/0")
    changed = {"user": None, "machine": "single_turn"}
    with RunStore.create(tmp_path / "old", RunHeader.of(first.loaded)) as store:
        await write_entries(await store.begin(first_task(first), 0), *journal[:3])
    other = Resumed(make_spec(["no", "It is 42."], tasks={"rows": rows}, **changed))
    (fault,) = (await other.run(tmp_path / "old")).faults
    assert "ReplayError: a/0: step 1 led from GENERATING by `answered` to AWAITING_USER_FEEDBACK; now it leads" in fault
    with other.store(tmp_path / "old") as store:
        assert store.finished() == {"b/0"}
        assert len(store.journal("a/0")) == 3


def first_task(resumed: Resumed) -> Any:
    """The first task of a spec."""
    from engine.spec.tasks import load_tasks

    return load_tasks(resumed.loaded)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_episodes_killed_again_and_again_pay_once(make_spec: Any, tmp_path: Path) -> None:
    """`kill -9` of the whole program, at moments that depend on the machine: whatever they hit, the sums are right."""
    import os
    import random
    import signal
    import time

    path = make_spec(
        ["It is 42."],
        tasks={"rows": [{"id": f"t{number}"} for number in range(1000)]},
        **PAID,
    )
    out = tmp_path / "runs"
    rng = random.Random(1)
    env = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}",
    }
    begin = [sys.executable, "-m", "engine.cli.main", "run", str(path), "--out", str(out), "-q"]
    go_on = [sys.executable, "-m", "engine.cli.main", "run", "--resume", "latest", "--out", str(out), "-q"]
    kills = 0
    while True:
        work = subprocess.Popen(go_on if list_runs(out) else begin, env=env, stdout=subprocess.DEVNULL, cwd=path.parent)
        while work.poll() is None:
            if kills < 8 and list_runs(out) and finished(out) > kills * 25:
                time.sleep(rng.uniform(0.0, 0.01))
                work.send_signal(signal.SIGKILL)
                kills += 1
                work.wait()
            time.sleep(0.002)
        if work.returncode == 0:
            break
        assert work.returncode == -signal.SIGKILL
    assert kills >= 3
    resumed = Resumed(path)
    with resumed.store(out) as store:
        assert Counter(row.reward for row in store.episodes()) == {1.0: 1000}
    assert asyncio.run(resumed.differences(out)) == []


def finished(out: Path) -> int:
    """Episodes of the run in `out` that are done."""
    with RunStore.open(list_runs(out)[0], readonly=True) as store:
        return len(store.finished())
