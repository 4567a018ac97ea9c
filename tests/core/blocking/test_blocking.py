"""Code that blocks, in whole runs: each misbehaviour in each place fails its own episode, and no other."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from blocking_code import MISBEHAVIOURS, misbehaves_at
from command_line import ended, engine_process
from slow_cases import slow_after
from written_specs import save_spec, scripted_spec

from engine.schemas.trajectory import Trajectory
from engine.store import RunStore, list_runs

HERE = Path(__file__).parent
start = partial(engine_process, modules=[HERE])
PLACES = ("environment", "tool", "user", "scorer")
SECONDS = 1.0
"""Deadline of each call."""
HEALTHY = 24


def write_spec(folder: Path, tokenizer: Path, tasks: list[dict[str, Any]], form: str = "", **changes: Any) -> Path:
    """A spec whose episodes ask an environment, a tool, a user and a scorer; `form` is `_async` or nothing."""
    call = {"tool_calls": [{"name": f"probe{form}", "arguments": {}}]}
    kind = "Async" if form else ""
    spec: dict[str, Any] = {
        **scripted_spec("blocking", tokenizer, [call, "It is 42."], tasks, ask=None),
        "environment": {"use": f"blocking_code:{kind}Board", "timeout": SECONDS},
        "tools": [{"use": f"blocking_code:probe{form}", "timeout": SECONDS}],
        "user": {"use": f"blocking_code:{kind}User", "timeout": SECONDS},
        "rewards": {"scorer": {"use": f"blocking_code:score{form}", "timeout": SECONDS}},
        "rollout": {"concurrency": 64},
    } | changes
    spec = {key: value for key, value in spec.items() if value is not None}
    return save_spec(folder / "spec.yaml", spec)


def told(folder: Path) -> dict[str, Trajectory]:
    """The finished episodes of the folder's one run, by task."""
    (run,) = list_runs(folder / "runs")
    return {trajectory.task_id: trajectory for trajectory in RunStore.open(run, readonly=True).trajectories()}


def bad_tasks(places: tuple[str, ...], hows: tuple[str, ...]) -> list[dict[str, str]]:
    return [bad_task(where, how) for where in places for how in hows]


def bad_task(where: str, how: str) -> dict[str, str]:
    return {"id": f"{where}-{how}", "where": where, "how": how}


def healthy_tasks() -> list[dict[str, str]]:
    return [{"id": f"healthy-{n}", "where": "", "how": ""} for n in range(HEALTHY)]


def check(episodes: dict[str, Trajectory], bad: list[dict[str, str]]) -> None:
    """Every episode came to the end that its task asked for."""
    for n in range(HEALTHY):
        outcome = episodes[f"healthy-{n}"].outcome
        assert (outcome.failure, outcome.reward, outcome.solved) == (None, 1.5, True), (n, outcome.failure)
    for task in bad:
        outcome = episodes[task["id"]].outcome
        hangs = task["how"] in ("sleep", "busy", "swallow")
        if task["where"] == "tool":  # the policy is told, and goes on
            results = [message.text for message in episodes[task["id"]].messages if message.role == "tool"]
            assert ("did not answer within" if hangs else "failed") in results[0], task
            assert (outcome.failure, outcome.reward) == (None, 1.5), (task, outcome.failure)
            continue
        blame = "environment" if task["where"] == "scorer" else task["where"]
        assert outcome.failure is not None, task
        kind = f"{blame}_timeout" if hangs else f"{blame}_error"
        assert (outcome.failure.kind, outcome.failure.blame) == (kind, blame), (task, outcome.failure)
        assert not outcome.trainable, task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "bad"),
    slow_after(
        1,
        [
            ("", [bad_task(*pair) for pair in zip(cycle(PLACES), MISBEHAVIOURS, strict=False)]),
            ("", bad_tasks(PLACES, MISBEHAVIOURS)),
            ("_async", bad_tasks(("tool", "user"), ("sleep", "swallow", "exit"))),
            ("_async", bad_tasks(PLACES, MISBEHAVIOURS)),
        ],
        several=True,
    ),
    ids=["each once", "all", "some async", "all async"],
)
def test_each_misbehaviour_fails_its_own_episode_and_no_other(
    form: str, bad: list[dict[str, str]], tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = write_spec(tmp_path, tiny_tokenizer_dir, [*bad, *healthy_tasks()], form)
    code, out, err = ended(start("run", spec, cwd=tmp_path))
    assert code == 0, out + err
    check(told(tmp_path), bad)


def stepping(effects: str) -> dict[str, Any]:
    """An episode of six steps of an environment that counts them."""
    states = {
        "PENDING": {"action": "reset"},
        "GENERATING": {"action": "generate"},
        "STEPPING": {"action": "step"},
        "DONE": {"action": "score", "final": True},
    }
    transitions = [
        {"trigger": "ready", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": ["answered", "malformed", "tool_calls"], "source": "GENERATING", "dest": "STEPPING"},
        {"trigger": "moved", "source": "STEPPING", "dest": "GENERATING"},
        {"trigger": "won", "source": "STEPPING", "dest": "DONE"},
        {"trigger": ["limit", "failed", "truncated", "aborted"], "source": "*", "dest": "DONE"},
    ]
    return {
        "backend": {"kind": "scripted", "replies": ["Go."] * 6},
        "environment": {"use": "blocking_code:AsyncBoard", "timeout": 5, "effects": effects},
        "machine": {"initial": "PENDING", "states": states, "transitions": transitions},
        "tools": [],
        "user": None,
        "rewards": {},
    }


@pytest.mark.slow  # by default: the test above, and tests/core/actions/calling/test_code_loops.py
@pytest.mark.parametrize("effects", ["replayable", "external"])
def test_episodes_whose_loop_was_blocked_go_on_from_their_journal_where_their_effects_allow_it(
    effects: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """All others are in the middle of a step on the loop that is blocked."""
    bad = {"id": "bad", "where": "step", "how": "sleep", "others": HEALTHY}
    spec = write_spec(tmp_path, tiny_tokenizer_dir, [bad, *healthy_tasks()], "_async", **stepping(effects))
    code, out, err = ended(start("run", spec, "--keep-going", cwd=tmp_path))
    assert code == (1 if effects == "external" else 0), out + err  # 1: no episode ended well
    episodes = told(tmp_path)
    failure = episodes["bad"].outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("environment_timeout", "environment")
    assert '"episode":"bad/0"' in err, "the log names the episode that blocked"
    assert "time.sleep(FOR_EVER)" in err, "and shows where"
    lost = 0
    for n in range(HEALTHY):
        episode = episodes[f"healthy-{n}"]
        if episode.outcome.failure is None:
            assert episode.facts["steps"] == 6
            assert [message.text for message in episode.messages if message.text.startswith("Moved")] == [
                f"Moved {step}." for step in range(1, 7)
            ]
        else:
            lost += 1
            assert episode.outcome.failure.kind == "loop_replaced"
            assert "`blocking_code:AsyncBoard`.step of episode bad/0" in episode.outcome.failure.message
    assert lost == (HEALTHY if effects == "external" else 0)


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param("swallow", marks=pytest.mark.slow),
        pytest.param("start_thread", marks=pytest.mark.slow),
        pytest.param("use_executor", marks=pytest.mark.slow),
    ],
)
def test_what_a_tool_leaves_behind_does_not_keep_the_process(
    tool: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = write_spec(
        tmp_path,
        tiny_tokenizer_dir,
        [{"id": "a"}],
        backend={"kind": "scripted", "replies": [{"tool_calls": [{"name": tool, "arguments": {}}]}, "It is 42."]},
        tools=[{"use": f"blocking_code:{tool}", "timeout": 0.2}],
    )
    code, out, err = ended(start("run", spec, cwd=tmp_path))
    assert code == 0, out + err
    assert told(tmp_path)["a"].outcome.solved


@pytest.mark.slow  # by default: tests/core/cli/test_run.py stops a run by a signal and resumes it
@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGTERM, signal.SIGINT], 143),
    ],
)
def test_signals_end_a_run_that_hangs_and_it_resumes(
    signals: list[signal.Signals],
    status: int,
    tmp_path: Path,
    tiny_tokenizer_dir: Path,
    request: pytest.FixtureRequest,
) -> None:
    bad = bad_tasks(("tool",), ("sleep", "busy", "swallow"))
    both = {"tool_calls": [{"name": name, "arguments": {}} for name in ("probe", "probe_async")]}
    spec = write_spec(
        tmp_path,
        tiny_tokenizer_dir,
        [*healthy_tasks(), *bad],
        "_async",
        backend={"kind": "scripted", "replies": [both, "It is 42."]},
        tools=[{"use": f"blocking_code:{name}", "timeout": 600} for name in ("probe", "probe_async")],
        rollout={"concurrency": 64, "live_episodes": 4},
    )
    gate = tmp_path / "gate"
    process = start("run", spec, cwd=tmp_path, GATE=str(gate))
    request.addfinalizer(process.kill)
    run = _wait_until(lambda: _waits(tmp_path, len(bad)))
    gate.touch()  # not before: a healthy call on a loop that they block would wait as long as they may
    for task in bad:
        _wait_until(partial(_path_if_there, misbehaves_at(gate, task["how"])))
    before = {key: value.json() for key, value in told(tmp_path).items()}
    assert len(before) == HEALTHY
    assert process.stderr is not None
    for number in signals[:-1]:
        process.send_signal(number)
        assert any(line.startswith("Stopping") for line in process.stderr)  # or the next one would be pending with it
    process.send_signal(signals[-1])
    code, out, err = ended(process)
    assert code == status, out + err
    hint = f"engine run --resume runs/{run.name}"
    assert hint in (out + err).replace("\n", " ")
    assert {key: value.json() for key, value in told(tmp_path).items()} == before
    code, out, err = ended(start("run", "--resume", run, cwd=tmp_path, CURED="1"))
    assert code == 0, out + err
    episodes = told(tmp_path)
    assert all(episode.outcome.solved for episode in episodes.values())
    assert len(episodes) == HEALTHY + len(bad)
    assert {key: episodes[key].json() for key in before} == before


def _waits(folder: Path, count: int) -> Path | None:
    """The folder's run, once so many episodes are all that is left and have called their tools."""
    for run in list_runs(folder / "runs"):
        store = RunStore.open(run, readonly=True)
        running = [key for key, status in store.statuses().items() if status == "running"]
        states = [entries[-1].dest for key in running if (entries := store.journal(key))]
        if len(store.finished()) == HEALTHY and states == ["AWAITING_TOOL"] * count:
            return run
    return None


def _path_if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _wait_until(found: Callable[[], Path | None], seconds: float = 100) -> Path:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run := found()) is not None:
            return run
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")
