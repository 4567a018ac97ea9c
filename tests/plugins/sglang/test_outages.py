"""`engine run` while its server is killed, refuses, or was never there: a real server process, and a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import ended, engine_here, engine_process, trajectories_of
from waiting import wait_until

from engine.schemas.trajectory import Trajectory
from engine.store import RunStore, list_runs

HERE = Path(__file__).parent
SPEC_CODE = HERE.parents[1] / "core/runner"
engine = partial(engine_process, modules=[SPEC_CODE], COLUMNS="250")


class Servers:
    """Server processes on one port, one after another."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self, *options: str | float) -> None:
        command = [sys.executable, str(HERE / "outage_server.py"), self.kind, str(self.port), *map(str, options)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def backend(self, **more: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}"
        if self.kind == "openai":
            return {"kind": "openai", "url": f"{url}/v1", "model": "m", **more}
        return {"kind": "sglang", "urls": [url], **more}


@pytest.fixture(params=["sglang", "openai"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    made = Servers(request.param)
    yield made
    made.kill()


@pytest.fixture
def sglang() -> Iterator[Servers]:
    made = Servers("sglang")
    yield made
    made.kill()


def write_spec(folder: Path, tokenizer: Path, backend: dict[str, Any], *, tasks: int = 24, **more: Any) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "outage",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": backend,
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "n": str(n)} for n in range(tasks)], "id": "id"},
        "prompt": [{"role": "user", "content": "What is 17 plus {{n}}?"}],
        "user": {"use": "code_for_tests:Critic"},
        "limits": {"assistant_turns": 4, "turn_tokens": 64},
        "rollout": {"concurrency": 8},
        **more,
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def finished(folder: Path) -> int:
    runs = list_runs(folder / "runs")
    return len(RunStore.open(runs[-1], readonly=True).finished()) if runs else 0


def results(run: Path) -> dict[str, Any]:
    """What came of each episode, without times."""
    return {trajectory.episode_id: _timeless(trajectory) for trajectory in trajectories_of(run)}


def _timeless(trajectory: Trajectory) -> dict[str, Any]:
    told = trajectory.plain()
    for part, names in ((told, ("run_id", "seconds")), *((turn, _TIMES) for turn in told["turns"])):
        for name in names:
            del part[name]
    return told


_TIMES = ("seconds", "queue_seconds", "cached_tokens")


def undisturbed(tmp_path: Path, tokenizer: Path, backend: dict[str, Any], **more: Any) -> dict[str, Any]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    code, _, err = ended(engine("run", write_spec(folder, tokenizer, backend, **more), "-q", cwd=folder))
    assert code == 0, err
    return results(list_runs(folder / "runs")[0])


def told(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "backend.json").read_text()))


@pytest.mark.slow
def test_a_server_that_is_killed_twice_costs_no_episode(
    tmp_path: Path, tiny_tokenizer_dir: Path, servers: Servers
) -> None:
    servers.start()
    spec = write_spec(tmp_path, tiny_tokenizer_dir, servers.backend())
    process = engine("run", spec, cwd=tmp_path)
    for enough in (3, 12):
        wait_until(lambda enough=enough: finished(tmp_path) >= enough)  # type: ignore[misc]
        servers.kill()
        time.sleep(1.0)
        servers.start()
    code, out, err = ended(process)
    assert code == 0, err
    (run,) = list_runs(tmp_path / "runs")
    assert RunStore.open(run, readonly=True).status == "done"
    found = results(run)
    assert len(found) == 24
    assert not [episode for episode in found.values() if episode["outcome"]["failure"]]
    assert found == undisturbed(tmp_path, tiny_tokenizer_dir, servers.backend())
    assert told(run)["outages"] >= 1, out


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["sglang", pytest.param("openai", marks=pytest.mark.exhaustive)], indirect=True)
def test_the_time_of_an_outage_is_no_episode_s(tmp_path: Path, tiny_tokenizer_dir: Path, servers: Servers) -> None:
    """The outage is longer than an episode may take, and than one reply may."""
    limits = {"assistant_turns": 4, "turn_tokens": 64, "episode_seconds": 5}
    servers.start("--latency", 0.2)
    backend = servers.backend(timeout=6)
    process = engine("run", write_spec(tmp_path, tiny_tokenizer_dir, backend, limits=limits), cwd=tmp_path)
    wait_until(lambda: finished(tmp_path) >= 3)
    servers.kill()
    time.sleep(8)
    servers.start()
    code, out, err = ended(process)
    assert code == 0, err
    assert " · waiting for the server for " in out
    (run,) = list_runs(tmp_path / "runs")
    assert results(run) == undisturbed(tmp_path, tiny_tokenizer_dir, backend, limits=limits)
    with RunStore.open(run, readonly=True) as store:
        assert max(sum(each.seconds.values()) for each in store.trajectories()) < 8


@pytest.mark.slow
def test_a_server_that_stays_away_stops_the_run_and_a_resume_finishes_it(
    tmp_path: Path, tiny_tokenizer_dir: Path, servers: Servers
) -> None:
    servers.start()
    process = engine("run", write_spec(tmp_path, tiny_tokenizer_dir, servers.backend(wait=1)), cwd=tmp_path)
    wait_until(lambda: finished(tmp_path) >= 3)
    servers.kill()
    code, _, err = ended(process)
    assert code == 3, err
    (run,) = list_runs(tmp_path / "runs")
    assert "Stopped: no reply for 1 s (`backend.wait`)" in err
    assert err.count("Stopped: ") == 1
    with RunStore.open(run, readonly=True) as store:
        assert store.status == "interrupted"
        before = {key: store.trajectory(key).json() for key in store.finished()}
        assert all(row.failure is None for row in store.episodes())
    code, _, err = ended(engine("run", "--resume", run, cwd=tmp_path))
    assert code == 3  # still nobody there
    assert "cannot be reached" in err
    servers.start()
    code, _, err = ended(engine("run", "--resume", run, cwd=tmp_path))
    assert code == 0, err
    with RunStore.open(run, readonly=True) as store:
        assert store.status == "done"
        assert {key: store.trajectory(key).json() for key in before} == before
    assert results(run) == undisturbed(tmp_path, tiny_tokenizer_dir, servers.backend())


@pytest.mark.parametrize("command", ["run", pytest.param("eval", marks=pytest.mark.slow)])
def test_nobody_there_at_the_start_stores_nothing(
    tmp_path: Path, tiny_tokenizer_dir: Path, sglang: Servers, command: str
) -> None:
    servers = sglang
    servers.start()
    spec = write_spec(tmp_path, tiny_tokenizer_dir, servers.backend(), tasks=2)
    code, _, err = engine_here("run", spec, "-q", cwd=tmp_path)
    assert code == 0, err
    (first,) = list_runs(tmp_path / "runs")
    servers.kill()
    began = time.monotonic()
    code, out, err = engine_here(command, spec, "-q", cwd=tmp_path, columns=250)
    assert code == 3, err
    assert time.monotonic() - began < 60  # and not `backend.wait`
    assert "cannot be reached" in err
    assert "Run: " not in out
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [first.name]
    code, out, _ = engine_here("export", "latest", cwd=tmp_path)
    assert code == 0
    assert first.name in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retry_after", "status"),
    [
        *[("2", 429), ("date", 503), ("none", 429)],
        *(pytest.param(*words, marks=pytest.mark.exhaustive) for words in [("2", 503), ("date", 429), ("none", 503)]),
    ],
)
def test_a_server_that_asks_for_a_pause_is_given_it(
    tmp_path: Path, tiny_tokenizer_dir: Path, servers: Servers, retry_after: str, status: int
) -> None:
    """One retry is for what was under way when the server was killed; the refusals use up none."""
    servers.start()
    backend = servers.backend(retries=1)
    process = engine("run", write_spec(tmp_path, tiny_tokenizer_dir, backend, tasks=16), cwd=tmp_path)
    wait_until(lambda: finished(tmp_path) >= 2)
    servers.kill()
    servers.start("--refuse", 2, "--retry-after", retry_after, "--status", status)
    code, _, err = ended(process)
    assert code == 0, err
    found = results(list_runs(tmp_path / "runs")[0])
    assert len(found) == 16
    assert not [episode for episode in found.values() if episode["outcome"]["failure"]]


@pytest.mark.slow
def test_a_longer_pause_than_the_run_waits_stops_it(tmp_path: Path, tiny_tokenizer_dir: Path, servers: Servers) -> None:
    servers.start("--serve", 8, "--refuse", 3600, "--retry-after", 86400)
    backend = servers.backend(wait=1.5)
    process = engine("run", write_spec(tmp_path, tiny_tokenizer_dir, backend, tasks=16), cwd=tmp_path)
    code, _, err = ended(process)
    assert code == 3, err
    assert "answered 429" in err
    (run,) = list_runs(tmp_path / "runs")
    with RunStore.open(run, readonly=True) as store:
        assert all(row.failure is None for row in store.episodes())


def test_prompts_that_a_server_does_not_report_are_counted_where_they_are_shown(
    tmp_path: Path, tiny_tokenizer_dir: Path, sglang: Servers
) -> None:
    sglang.start("--no-echo", "--latency", 0.0)
    spec = write_spec(tmp_path, tiny_tokenizer_dir, sglang.backend())
    status, _, err = engine_here("run", spec, cwd=tmp_path, columns=250)
    assert (status, "set `backend.unchecked_prompts: allow`" in err) == (1, True), err
    assert list_runs(tmp_path / "runs") == []

    spec = write_spec(tmp_path, tiny_tokenizer_dir, sglang.backend(unchecked_prompts="allow"), tasks=4)
    status, out, err = engine_here("run", spec, cwd=tmp_path, columns=250)
    assert status == 0, err
    [folder] = list_runs(tmp_path / "runs")
    trajectories = trajectories_of(folder)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    assert turns >= 4
    assert all(turn.prompt_unchecked for trajectory in trajectories for turn in trajectory.turns)
    warning = f"prompts unchecked: {turns:,}. The server did not report them"
    assert warning in out
    assert f"· prompts unchecked: {turns:,}" in out + err  # of the last line of progress
    assert f"Certificate: 0 prompts compared with the prompt that the server used, 0 differ, {turns} could not" in out

    status, out, _ = engine_here("export", "latest", "-o", "rows.jsonl", cwd=tmp_path, columns=250)
    assert (status, warning in out) == (0, True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(row["unchecked_prompts"] for row in rows) == turns
