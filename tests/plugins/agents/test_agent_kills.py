"""`kill -9` of the engine while agent programs run, then a resume: nothing is lost, nothing is trained twice, no program is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import check_rows, write_spec
from stopping import Resumed, content
from waiting import process_runs, wait_until

from engine.backends.scripted import ScriptedBackend
from engine.schemas.generation import GenerateRequest, Generation
from engine.schemas.journal import GenerationRecord
from engine.schemas.trajectory import Trajectory
from engine.store import list_runs

GIVE = """
def give(value):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    data = json.dumps({"value": value}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["EPISODE_REWARD_URL"], data, headers)).close()
"""
IN_TURN = (
    GIVE
    + """
one = chat(ASK)
give(1.0)
status, two = post({"messages": [ASK, one, ASK], "n": 2})
chat(ASK, one, ASK, two["choices"][1]["message"], ASK)
chat({"role": "user", "content": "A summary."})
reward(4.0)
"""
)
IN_PARALLEL = """
from concurrent.futures import ThreadPoolExecutor
def work(at):
    ask = {"role": "user", "content": f"Part {at}"}
    one = chat(ask)
    chat(ask, one, ASK)
with ThreadPoolExecutor(3) as pool:
    list(pool.map(work, range(3)))
reward(1.0)
"""


def record_calls(file: Path) -> Callable[[Any, GenerateRequest], Awaitable[Generation]]:
    """A `generate` of the scripted backend that also appends the prompt and the reply of each call to a file."""
    generate = ScriptedBackend.generate

    async def recorded(self: ScriptedBackend, request: GenerateRequest) -> Generation:
        generation = await generate(self, request)
        with file.open("a") as opened:
            opened.write(json.dumps([request.input_ids.tolist(), generation.output_ids.tolist()]) + "\n")
        return generation

    return recorded


def assert_seen(trajectory: Trajectory, file: Path) -> None:
    """The backend, of the killed process or of this one, was given the prompt of each turn and gave its reply."""
    seen = [json.loads(line) for line in file.read_text().splitlines()]
    for turn in trajectory.turns:
        ids = trajectory.branches[turn.branch].input_ids.tolist()
        assert [ids[: turn.start], ids[turn.start : turn.end]] in seen


def killed_after(spec: Path, folder: Path, commit: int, calls: Path) -> bool:
    """Run a spec in a process that kills itself after a commit; whether that commit came."""
    code = (
        "import stopping, test_agent_kills as kills; from pathlib import Path; "
        f"kills.ScriptedBackend.generate = kills.record_calls(Path({str(calls)!r})); stopping.serve(Path({str(spec)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=f"{folder} {commit}\n",
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[3],
    )
    return int(done.stdout) == signal.SIGKILL


async def resumed(spec: Resumed, out: Path) -> tuple[Trajectory, int]:
    """The episode after a resume, and its attempt."""
    await spec.run(out)
    with spec.store(out) as store:
        (trajectory,) = store.trajectories()
        attempt = store.episode(trajectory.episode_id).attempt
    assert await spec.differences(out) == []
    check_rows(trajectory)
    return trajectory, attempt


@pytest.mark.slow
async def test_an_episode_killed_after_any_commit_goes_on_from_its_journal(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls.jsonl"
    record = record_calls(calls)
    path = write_spec(tmp_path, tiny_tokenizer_dir, IN_TURN, list("abcde"))
    spec = Resumed(path)
    whole, _ = await resumed(spec, tmp_path / "whole")
    assert [turn.rewards for turn in whole.turns] == [{"reward": 1.0}, {}, {}, {}, {"reward": 4.0}]
    assert [branch.reason for branch in whole.branches] == ["", "sibling", "subagent"]
    for commit in range(1, 30, 2):
        out = tmp_path / str(commit)
        if not killed_after(path, out, commit, calls):
            break
        with monkeypatch.context() as patched:
            patched.setattr(ScriptedBackend, "generate", record)
            again, attempt = await resumed(spec, out)
        assert_seen(again, calls)
        calls.unlink()
        assert attempt == 0
        assert content(again) == content(whole)
    assert commit >= 10


@pytest.mark.slow
@pytest.mark.exhaustive
async def test_requests_in_parallel_go_on_from_the_journal_in_its_order_or_begin_again(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls.jsonl"
    record = record_calls(calls)
    replies: list[Any] = [{"text": text, "delay": 0.1} for text in "abcdef"]
    (tmp_path / "script.json").write_text(json.dumps({"replies": replies, "exhausted": "cycle"}))
    path = write_spec(tmp_path, tiny_tokenizer_dir, IN_PARALLEL, "script.json")
    spec, attempts = Resumed(path), []
    for commit in range(2, 30, 3):
        out = tmp_path / str(commit)
        if not killed_after(path, out, commit, calls):
            break
        with monkeypatch.context() as patched:
            patched.setattr(ScriptedBackend, "generate", record)
            again, attempt = await resumed(spec, out)
        assert_seen(again, calls)
        calls.unlink()
        attempts.append(attempt)
        assert len(again.turns) == 6
        assert len(again.branches) == 3
        assert again.outcome.reward == 1.0
    assert attempts.count(0) > len(attempts) / 2, attempts


@pytest.mark.slow
def test_the_program_dies_with_the_engine_and_runs_again_on_a_resume(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The whole command: killed while the program waits, continued with `--resume latest`."""
    program = """
import subprocess
chat(ASK)
if not os.path.exists("pids"):
    child = subprocess.Popen(["setsid", "sleep", "600"])
    with open("pids.new", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename("pids.new", "pids")
    time.sleep(600)
chat(ASK, ASK)
reward(1.0)
"""
    path = write_spec(tmp_path, tiny_tokenizer_dir, program, ["one", "two"])
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "engine.cli.main", "run", "--out", str(tmp_path / "runs"), "-q"]
    engine = subprocess.Popen([*command, str(path)], env=env, cwd=tmp_path)
    wait_until(lambda: (tmp_path / "pids").exists())
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert all(map(process_runs, pids))
    engine.kill()
    engine.wait()
    killed = time.time()
    wait_until(lambda: not any(map(process_runs, pids)))
    assert subprocess.run([*command, "--resume", "latest"], env=env, cwd=tmp_path, timeout=120).returncode == 0
    spec = Resumed(path)
    with spec.store(tmp_path / "runs") as store:
        (trajectory,) = store.trajectories()
        row, journal = store.episode("a/0"), store.journal("a/0")
    assert len(list_runs(tmp_path / "runs")) == 1
    assert row.attempt == 0
    assert trajectory.outcome.reward == 1.0
    sampled = [entry.at < killed for entry in journal if isinstance(entry.record, GenerationRecord)]
    assert sampled == [True, False]
    check_rows(trajectory)
