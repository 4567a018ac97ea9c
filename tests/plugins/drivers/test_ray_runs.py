"""Commands with several drivers, on a real Ray.

Needs Ray (the extra `ray`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from written_specs import save_spec, scripted_spec

from engine.store import RunStore

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

CODE = Path(__file__).parents[2] / "core" / "runner"


def spec_of(folder: Path, tokenizer: Path) -> Path:
    """Five tasks, two episodes each; the first answer is wrong, the second right."""
    spec: dict[str, Any] = {
        **scripted_spec("demo", tokenizer, ["It is 41.", "It is 42."], 5),
        "user": {"use": "code_for_tests:Critic"},
        "rollout": {"samples_per_task": 2, "concurrency": 4, "seed": 3},
    }
    return save_spec(folder / "spec.yaml", spec)


def engine(*words: str | Path, cwd: Path, **environ: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "engine.cli.main", *map(str, words)]
    path = os.pathsep.join([str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", **environ}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_evaluation_with_two_drivers_measures_what_one_measures(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    one, two = (
        json.loads(engine("eval", spec, "--json", "--set", f"rollout.drivers={count}", cwd=tmp_path))
        for count in (1, 2)
    )
    assert (tmp_path / two["run"] / "sharded.json").is_file()
    assert {**two, "run": one["run"]} == one
    assert (one["tasks"], one["episodes"], one["estimates"]["success"]["value"]) == (5, 10, 1.0)
    exported = engine("export", tmp_path / two["run"], "--out", tmp_path / "rows.jsonl", cwd=tmp_path)
    assert "none of them is trainable: this run is an evaluation" in exported


def test_auto_runs_on_as_many_drivers_as_it_picks(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    changes = ["--set", "rollout.drivers=auto", "--set", "rollout.concurrency=2048"]
    said = engine("run", spec, *changes, cwd=tmp_path, EPISODE_ENGINE_PROCESSES="2")
    assert "2 drivers asked to begin" in said
    assert len(list(tmp_path.glob("runs/*/drivers/*/run.db"))) == 2


def test_a_run_of_two_drivers_whose_every_episode_fails_is_not_a_success(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    text = yaml.safe_load(spec.read_text())
    text["user"] = {"use": "failing_user:User"}
    spec.write_text(yaml.safe_dump(text))
    code = "class User:\n    def respond(self, view):\n        raise KeyError('no desk')\n"
    (tmp_path / "failing_user.py").write_text(code)
    command = ["engine.cli.main", "run", spec, "-q", "--keep-going", "--set", "rollout.drivers=2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CODE), str(tmp_path)]), "RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert f"10 of 10 episodes failed: 10 user_error (user) at {spec}:" in ended.stderr
    assert "raised KeyError: 'no desk'" in ended.stderr
    assert "Correct it, and run the spec again" in ended.stderr


def test_a_node_of_a_cluster_is_killed_and_its_groups_are_run_by_the_other_drivers(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three raylets with one CPU each, so that the driver of the killed one gets no CPU again: its leases return after the time-out."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    slow = [{"text": "It is 41.", "delay": 0.3}, {"text": "It is 42.", "delay": 0.3}]
    text = yaml.safe_load(spec.read_text())
    text["tasks"]["rows"] = [{"id": f"t{n}"} for n in range(60)]
    text["backend"]["replies"] = slow
    text["rollout"] |= {"drivers": 3, "shards": str(tmp_path / "shards"), "concurrency": 6, "live_episodes": 6}
    spec.write_text(yaml.safe_dump(text))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        lost, _ = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
        path = os.pathsep.join([str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": cluster.address}
        command = [sys.executable, "-m", "engine.cli.main", "run", str(spec), "-q", "--out", "many"]
        run = subprocess.Popen(command, cwd=tmp_path, env=env)
        while len(list((tmp_path / "many").glob("*/drivers/*/run.db"))) < 3 and run.poll() is None:
            time.sleep(0.1)
        cluster.remove_node(lost, allow_graceful=False)
        assert run.wait() == 0
    finally:
        cluster.shutdown()
    (folder,) = (tmp_path / "many").iterdir()
    with RunStore.open(folder, readonly=True) as store:
        assert store.finished() == {f"t{task}/{sample}" for task in range(60) for sample in range(2)}
        assert {each.outcome.solved for each in store.trajectories()} == {True}
