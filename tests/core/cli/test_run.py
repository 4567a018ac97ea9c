"""`engine run` as a user meets it: a process that prints, stores, is interrupted, is killed, and goes on."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import ended, engine_here, engine_process
from installed_plugins import needs_plugin
from written_specs import save_spec

from engine.store import RunStore, list_runs

ROOT = Path(__file__).parents[3]
SPEC_CODE = ROOT / "tests" / "core" / "runner"
engine = partial(engine_process, modules=[SPEC_CODE])
HELD = """
import time
from pathlib import Path

from code_for_tests import Critic


class Held(Critic):
    def respond(self, view):
        while int(view.task.id[1:]) >= 4 and not Path({gate!r}).exists():
            time.sleep(0.02)
        return super().respond(view)
"""
ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}


def write_spec(folder: Path, tokenizer: Path, *, tasks: int, delay: float = 0.0, log: Path | None = None) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "cli",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": [ADD, "It is 41.", "It is 42."], "latency": delay},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(tasks)], "id": "id"},
        "prompt": [{"role": "user", "content": "What is 17 plus 25?"}],
        "tools": [{"use": "code_for_tests:add"}],
        "user": {"use": "code_for_tests:Critic", "with": {"log": str(log)} if log else {}},
        "rollout": {"live_episodes": 4},
    }
    return save_spec(folder / "spec.yaml", spec)


def test_a_run_prints_its_summary_and_where_it_is(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks=3)
    code, out, err = engine_here("run", spec, cwd=tmp_path)
    assert code == 0, err
    (folder,) = list_runs(tmp_path / "runs")
    lines = out.splitlines()
    assert "3/3 episodes" in out
    assert "3 episodes · 3 rows · 3 trainable · mean reward 0.900 (correct +1.000, reward -0.100)" in lines
    assert f"Run: runs/{folder.name}" in lines
    for source, event, dest, taken in [
        ("GENERATING", "tool_calls", "AWAITING_TOOL", 3),
        ("AWAITING_USER_FEEDBACK", "feedback", "GENERATING", 3),
        ("AWAITING_USER_FEEDBACK", "satisfied", "DONE", 3),
        ("GENERATING", "answered", "AWAITING_USER_FEEDBACK", 6),
    ]:
        row = next(line for line in lines if f" {source} " in line and f" {event} " in line)
        assert [cell.strip() for cell in row.strip("│").split("│")] == [source, event, dest, str(taken)]


def test_limit_and_set_are_kept_in_the_run(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks=3)
    code, _, err = engine_here(
        "run",
        spec,
        "--limit",
        "2",
        "--set",
        "rollout.seed=5",
        "--out",
        tmp_path / "elsewhere",
        cwd=tmp_path,
    )
    assert code == 0, err
    (folder,) = list_runs(tmp_path / "elsewhere")
    store = RunStore.open(folder, readonly=True)
    assert sorted(store.finished()) == ["t0/0", "t1/0"]
    assert store.header.spec["rollout"]["seed"] == 5
    assert store.header.overrides == ["rollout.seed=5", "tasks.limit=2"]


def test_an_invalid_spec_runs_nothing(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks=1)
    spec.write_text(spec.read_text() + "limitz: {}\n")
    code, _, err = engine_here("run", spec, cwd=tmp_path)
    assert code == 1
    line = spec.read_text().splitlines().index("limitz: {}") + 1
    assert f"spec.yaml:{line}:1: error[spec.unknown-key]" in err
    assert "`limits`" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow  # by default: test_cli_stopping.py, and tests/core/runner/test_stopped_runs.py
def test_ctrl_c_ends_cleanly_and_resume_finishes(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The user of all episodes but the first four waits until the run is resumed."""
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks=40)
    spec.write_text(spec.read_text().replace("code_for_tests:Critic", "held:Held"))
    (tmp_path / "held.py").write_text(HELD.format(gate=str(tmp_path / "resumed")))
    process = engine("run", spec, cwd=tmp_path)
    _wait_for_finished(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 130, err
    (folder,) = list_runs(tmp_path / "runs")
    assert f"Interrupted. To finish it: engine run --resume runs/{folder.name}" in out.replace("\n", " ")
    store = RunStore.open(folder, readonly=True)
    done = store.finished()
    assert sorted(done) == [f"t{n}/0" for n in range(4)]
    assert store.status == "interrupted"
    before = {key: store.trajectory(key).json() for key in done}
    (tmp_path / "resumed").touch()
    code, _, err = engine_here("run", "--resume", folder, cwd=tmp_path)
    assert code == 0, err
    assert len(store.finished()) == 40
    assert store.status == "done"
    assert {key: store.trajectory(key).json() for key in done} == before


def _wait_for_finished(folder: Path, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for run in list_runs(folder / "runs"):
            if len(RunStore.open(run, readonly=True).finished()) >= count:
                return
        time.sleep(0.05)
    raise AssertionError(f"no {count} episodes were finished within {seconds} s")


def _kill_and_finish(tmp_path: Path, tokenizer: Path, kills: int, rng: random.Random) -> None:
    log = tmp_path / "asked.log"
    spec = write_spec(tmp_path, tokenizer, tasks=24, delay=0.03, log=log)
    process = engine("run", spec, cwd=tmp_path)
    _wait_for_finished(tmp_path, 1)
    (folder,) = list_runs(tmp_path / "runs")
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 0.25))
        process.kill()
        process.communicate()
        told = [tuple(line.split(" ", 2)) for line in log.read_text().splitlines()]
        store = RunStore.open(folder, readonly=True)
        journals = {key: store.journal(key) for key in {episode for episode, _, _ in told}}
        for episode, turn, reply in told:
            # The user was asked about this turn, so the turn was finished: its tokens are in the journal.
            replies = [entry for entry in journals[episode] if entry.record.kind == "generation"]
            assert len(replies) > int(turn), f"{episode}: turn {turn} ({reply}) is lost"
        process = engine("run", "--resume", folder, cwd=tmp_path)
    code, _, err = ended(process)
    assert code == 0, err
    store = RunStore.open(folder, readonly=True)
    assert len(store.finished()) == 24
    for trajectory in store.trajectories():
        assert [step[1] for step in trajectory.path] == [
            "ready", "tool_calls", "results", "answered", "feedback", "answered", "satisfied",
        ]  # fmt: skip
        assert [turn.rewards for turn in trajectory.turns] == [{}, {"reward": -0.1}, {"correct": 1.0}]
    asked = log.read_text().splitlines()
    assert len(asked) - len(set(asked)) <= 4 * kills  # only what was under way when it was killed is asked again
    code, out, _ = ended(engine("replay", folder, cwd=tmp_path))
    assert code == 0
    assert "24 the same to the byte" in out


@pytest.mark.slow
def test_kill_9_loses_no_finished_turn(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    _kill_and_finish(tmp_path, tiny_tokenizer_dir, kills=2, rng=random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_many_times_loses_no_finished_turn(tmp_path: Path, tiny_tokenizer_dir: Path, seed: int) -> None:
    _kill_and_finish(tmp_path, tiny_tokenizer_dir, kills=6, rng=random.Random(seed))


@needs_plugin("scaffold")
def test_help_teaches(tmp_path: Path) -> None:
    code, out, _ = engine_here("--help", cwd=tmp_path)
    assert code == 0
    for command in ("new", "validate", "graph", "run", "export", "replay", "schema", "models"):
        assert f" {command} " in out


@pytest.mark.slow
def test_a_fork_keeps_what_came_before_its_turn(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks=3)
    code, _, err = ended(engine("run", spec, "--quiet", cwd=tmp_path))
    assert code == 0, err
    (first,) = list_runs(tmp_path / "runs")
    code, _, err = ended(engine("replay", first.name, "--from-turn", "1", "--salt", "5", cwd=tmp_path))
    assert code == 0, err
    (second,) = [folder for folder in list_runs(tmp_path / "runs") if folder != first]
    old, new = RunStore.open(first, readonly=True), RunStore.open(second, readonly=True)
    assert new.header.spec["rollout"]["salt"] == 5
    assert len(new.finished()) == 3
    for key in new.finished():
        before, after = old.journal(key), new.journal(key)
        kept = 3  # reset, turn 0, its tool; then turn 1 begins
        assert [entry.json() for entry in after[:kept]] == [entry.json() for entry in before[:kept]]
        assert after[kept].at > before[-1].at
        assert [step[1] for step in new.trajectory(key).path] == [step[1] for step in old.trajectory(key).path]
