"""`ray job submit` on a local cluster of several raylets.

Needs Ray with its dashboard: `pip install 'ray[default]'`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from written_specs import scripted_spec

from engine.store import RunStore

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytest.importorskip("aiohttp_cors", reason="needs Ray's dashboard, which takes jobs: pip install 'ray[default]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.exhaustive
def test_a_job_runs_its_drivers_on_several_raylets(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster
    from ray.util.state import list_actors

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    work = tmp_path / "work"
    work.mkdir()
    (work / "job_tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: One.\n        b: The other.\n    """\n    return a + b\n'
    )
    spec = {
        **scripted_spec(
            "job",
            tiny_tokenizer_dir,
            [{"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}], "delay": 0.1}, "It is 42."],
            40,
        ),
        "tools": [{"use": "job_tools:add"}],
        "machine": "tools",
        "rollout": {"samples_per_task": 2, "concurrency": 6, "seed": 3},
    }
    (work / "spec.yaml").write_text(yaml.safe_dump(spec))
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0}
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        address = f"http://{cluster.head_node.webui_url}"  # type: ignore[attr-defined]
        variables = {name: value for name, value in os.environ.items() if name.startswith("EPISODE_ENGINE_")}
        environment = {"env_vars": {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        words = ["--address", address, "--working-dir", str(work), "--runtime-env-json", json.dumps(environment)]
        run = [sys.executable, "-m", "engine.cli.main", "run", "spec.yaml", "-q", "--set", "rollout.drivers=3"]
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "job",
                "submit",
                *words,
                "--",
                *run,
                "--out",
                str(tmp_path / "runs"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        actors = list_actors(address=address, filters=[("class_name", "=", "Driver")])
        assert len({actor.node_id for actor in actors}) == 3
    finally:
        cluster.shutdown()
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (folder / "drivers").iterdir()) == ["0", "1", "2"]
    with RunStore.open(folder, readonly=True) as store:
        assert store.finished() == {f"t{task}/{sample}" for task in range(40) for sample in range(2)}
        assert {each.outcome.event for each in store.trajectories()} == {"answered"}
