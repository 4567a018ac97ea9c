"""Whole runs on the real server: rows that it confirms, replays, interrupts, and a server that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml
from command_line import ended, engine_process
from ended_runs import run_to_end
from server_load import aborted
from waiting import wait_until
from written_specs import save_spec

from engine.backends.registry import open_backend
from engine.runner.runner import Runner
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.store.rows.export import export_rows
from engine.tokens.loading import load_format

HERE = Path(__file__).parent
engine = partial(engine_process, modules=[HERE])
STOPS = list(range(300, 400))
"""Ids that end a reply, beside the format's own: the model says each thing about as often as any other."""
Running = Any
MakeSpec = Callable[..., Path]


@pytest.fixture
def make_spec(tmp_path: Path, tiny_model_dir: Path) -> MakeSpec:
    """Write a spec with a tool and a user for these servers."""

    def make(*urls: str, name: str = "spec", **changes: Any) -> Path:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": name,
            "model": {"path": str(tiny_model_dir), "tool_calls": "code_on_sglang:OddsAreCalls"},
            "backend": {"kind": "sglang", "urls": list(urls)},
            "sampling": {"temperature": 1.0, "stop_token_ids": STOPS},
            "tasks": {"source": "inline", "rows": [{"id": "a", "n": 17}, {"id": "b", "n": 25}], "id": "id"},
            "prompt": [{"role": "user", "content": "What is {{n}} plus 25?"}],
            "tools": [{"use": "code_on_sglang:measure"}],
            "user": {"use": "code_on_sglang:Pedant"},
            "machine": "tools_and_user",
            "limits": {"turn_tokens": 80, "assistant_turns": 6},
            "rollout": {"seed": 3, "samples_per_task": 3},
        }
        for key, value in changes.items():
            spec[key] = spec[key] | value if isinstance(value, dict) and isinstance(spec.get(key), dict) else value
        return save_spec(tmp_path / f"{name}.yaml", spec)

    return make


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data, {"Content-Type": "application/json"}), timeout=60) as reply:
        return json.load(reply)


def working(url: str) -> int:
    """Requests that a server is busy with."""
    loads = ask(url, "/v1/loads")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def rolled_out(path: Path, folder: Path) -> dict[str, Trajectory]:
    """A run in this process; every trajectory by its episode."""
    ran = await run_to_end(path, folder)
    assert not ran.result.faults
    return ran.trajectories


@pytest.fixture
def code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def test_the_rows_of_a_run_are_what_the_server_says_it_sampled(
    sglang_server: Running, make_spec: MakeSpec, tmp_path: Path
) -> None:
    code, out, err = ended(engine("run", make_spec(sglang_server.url), "--out", "runs", cwd=tmp_path))
    assert code == 0, out + err
    (folder,) = (tmp_path / "runs").iterdir()
    store = RunStore.open(folder, readonly=True)
    trajectories = list(store.trajectories())
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert len(trajectories) == 6
    assert {turn.event for turn in turns} >= {"tool_calls", "answered"}
    assert {trajectory.outcome.failure for trajectory in trajectories} == {None}

    # every prompt was compared with the one that the server worked on
    assert (
        f"Certificate: {len(turns)} prompts compared with the prompt that the server used, 0 differ, 0 could not" in out
    )
    certificate = json.loads((folder / "backend.json").read_text())["certificate"]
    assert certificate == {"turns_checked": len(turns), "turns_unchecked": 0, "prompt_mismatches": 0}

    # the server, given a whole row, finds each sampled token as likely as when it sampled it
    for row in export_rows(store):
        body = {"input_ids": row["input_ids"].tolist(), "sampling_params": {"max_new_tokens": 0}}
        meta = ask(sglang_server.url, "/generate", body | {"return_logprob": True, "logprob_start_len": 0})["meta_info"]
        scored = meta["input_token_logprobs"]
        assert [token for _, token, _ in scored] == row["input_ids"].tolist()
        sampled = np.flatnonzero(row["loss_mask"])
        np.testing.assert_allclose([scored[at][0] for at in sampled], row["logprobs"][sampled], atol=2e-4)

    code, out, err = ended(engine("replay", folder, cwd=tmp_path))
    assert code == 0, out + err
    tokens = sum(len(branch.input_ids) for trajectory in trajectories for branch in trajectory.branches)
    assert out.strip() == f"6 episodes, {tokens} tokens replayed: 6 the same to the byte"


@pytest.mark.usefixtures("code_is_found")
async def test_greedy_episodes_are_the_same_here_and_on_the_server(
    sglang_server: Running, make_spec: MakeSpec, tmp_path: Path
) -> None:
    greedy = {"temperature": 0.0}
    prompts = {"rows": [{"id": str(n), "n": n} for n in range(6)]}
    common: dict[str, Any] = {"sampling": greedy, "tasks": prompts, "rollout": {"samples_per_task": 1}}
    here = make_spec(name="here", **common, backend={"kind": "local", "dtype": "float32", "device": "cpu"})
    data = yaml.safe_load(here.read_text())
    del data["backend"]["urls"]
    here.write_text(yaml.safe_dump(data))
    there = make_spec(sglang_server.url, name="there", **common)
    ours = await rolled_out(here, tmp_path / "here")
    theirs = await rolled_out(there, tmp_path / "there")
    assert list(ours) == list(theirs)
    assert {turn.event for one in ours.values() for turn in one.turns} >= {"tool_calls", "answered"}
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert one.path == other.path
        assert [message.plain() for message in one.messages] == [m.plain() for m in other.messages]
        assert one.outcome == other.outcome
        for branch, same in zip(one.branches, other.branches, strict=True):
            assert branch.input_ids.tolist() == same.input_ids.tolist()
            assert branch.loss_mask.tolist() == same.loss_mask.tolist()
            assert branch.turn_ids.tolist() == same.turn_ids.tolist()
            np.testing.assert_allclose(branch.logprobs, same.logprobs, atol=1e-4)


def test_ctrl_c_leaves_no_request_on_the_server(sglang_server: Running, make_spec: MakeSpec, tmp_path: Path) -> None:
    long = make_spec(
        sglang_server.url, sampling={"temperature": 1.0, "ignore_eos": True, "stop_token_ids": []},
        limits={"turn_tokens": 3500},
    )  # fmt: skip
    before = aborted(sglang_server.url)
    process = engine("run", long, "--out", "runs", cwd=tmp_path)
    wait_until(lambda: working(sglang_server.url) == 6, 60)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 130, out + err
    assert "Interrupted. To finish it: engine run --resume" in out
    wait_until(lambda: working(sglang_server.url) == 0, 60)
    assert aborted(sglang_server.url) == before + 6
    (folder,) = (tmp_path / "runs").iterdir()
    assert list(RunStore.open(folder, readonly=True).trajectories()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("code_is_found")
async def test_episodes_go_on_elsewhere_when_their_server_is_killed(
    sglang_server: Running, second_server: Running, make_spec: MakeSpec, tmp_path: Path
) -> None:
    rows = {"rows": [{"id": str(n), "n": n} for n in range(8)]}
    expected = await rolled_out(make_spec(sglang_server.url, name="one", tasks=rows), tmp_path / "one")

    loaded = load_spec(make_spec(second_server.url, sglang_server.url, name="two", tasks=rows))
    form = load_format(loaded.spec.model, loaded.base)
    backend: Any = open_backend(loaded, form)
    await backend.start()
    with RunStore.create(tmp_path / "two", RunHeader.of(loaded)) as store:
        run = asyncio.create_task(Runner(loaded, load_tasks(loaded), form, backend, store).run())
        async with asyncio.timeout(60):
            while backend.stats()["turns"] < 8 or not backend.pool.workers[0].in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second_server.kill()
        result = await run
        stats = backend.stats()
        await backend.close()
        assert not result.faults
        found = {trajectory.episode_id: trajectory for trajectory in store.trajectories()}
        journals = {episode: store.journal(episode) for episode in found}

    # a turn's seed decides what is sampled, so episodes are the same whichever server they were on
    assert stats["failovers"] > 0
    assert set(found) == set(expected)
    assert len(found) == 24
    for episode, trajectory in found.items():
        same = expected[episode]
        assert trajectory.outcome == same.outcome
        assert [branch.input_ids.tolist() for branch in trajectory.branches] == [
            branch.input_ids.tolist() for branch in same.branches
        ]
        replies = [entry for entry in journals[episode] if entry.record.kind == "generation"]
        assert len(replies) == len(trajectory.turns)
    turns = sum(len(trajectory.turns) for trajectory in found.values())
    assert stats["turns"] == turns
    assert stats["certificate"] == {"turns_checked": turns, "turns_unchecked": 0, "prompt_mismatches": 0}


CPU_SERVER = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *(
        "--max-total-tokens",
        "16384",
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
    ),
    *("--skip-server-warmup", "--sleep-on-idle"),
]
"""What a real server needs on a machine without GPUs, as in scripts/sglang_cpu.sh."""


def server_processes(port: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if port.encode() in words and b"sglang.launch_server" in words and b"-S" not in words:
            found.append(int(entry.name))
    return found


def test_a_run_starts_its_server_starts_it_again_and_leaves_no_process(
    make_spec: MakeSpec, tmp_path: Path, sglang_interpreter: Path
) -> None:
    stand_ins = HERE.parents[3] / "scripts" / "sglang_cpu"
    environment = {
        "PYTHONPATH": str(stand_ins),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    launch = {"gpus": 0, "python": str(sglang_interpreter), "args": CPU_SERVER, "env": environment}
    spec = make_spec(name="launched", rollout={"samples_per_task": 24, "concurrency": 2})
    written = yaml.safe_load(spec.read_text())
    written["backend"] = {"kind": "sglang", "launch": launch}
    spec.write_text(yaml.safe_dump(written))
    process = engine("run", spec, "--out", tmp_path / "runs", cwd=tmp_path)
    logs: list[Path] = []

    def sampling() -> bool:
        assert process.poll() is None, ended(process)
        logs[:] = tmp_path.glob("runs/*/servers/server-0.log")
        return bool(logs) and logs[0].read_text(errors="replace").count("POST /generate") > 30

    wait_until(sampling, 300)
    [log] = logs
    port = log.read_text().splitlines()[0].partition("--port ")[2].split()[0]
    [pid] = server_processes(port)
    os.kill(pid, signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 0, out + err
    [told] = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/backend.json")]
    assert told["launched"][0]["restarts"] == 1
    assert told["certificate"]["turns_unchecked"] == told["certificate"]["prompt_mismatches"] == 0
    with RunStore.open(next(tmp_path.glob("runs/*")), readonly=True) as store:
        assert {trajectory.outcome.failure for trajectory in store.trajectories()} == {None}
    assert server_processes(port) == []
