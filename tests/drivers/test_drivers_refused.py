"""What several drivers cannot do is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import engine_here

from engine.checks.check import check_spec
from engine.spec.load import load_spec


@pytest.fixture
def spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "spec": "episode/v1",
                "name": "many",
                "model": {"path": str(tiny_tokenizer_dir), "tool_calls": "hermes"},
                "backend": {"kind": "scripted", "replies": ["Four."]},
                "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
                "prompt": [{"role": "user", "content": "What is 2 plus 2?"}],
                "machine": "tools",
            }
        )
    )
    return path


def found(spec: Path, *changes: str) -> list[tuple[str, str]]:
    return [(each.rule, each.message) for each in check_spec(load_spec(spec, list(changes))) if "rollout." in each.rule]


def test_more_drivers_than_places(spec: Path) -> None:
    assert found(spec, "rollout.drivers=4", "rollout.concurrency=4") == []
    assert found(spec, "rollout.drivers=4", "rollout.concurrency=3") == [
        ("rollout.drivers", "4 drivers share 3 places (`concurrency`, `live_episodes`)")
    ]


def test_weights_in_the_process(spec: Path) -> None:
    assert ("rollout.drivers", "each driver would load a copy of the weights") in found(
        spec, "rollout.drivers=2", "backend={kind: local}"
    )


def test_servers_that_the_run_starts(spec: Path) -> None:
    assert ("rollout.drivers", "each driver would start servers of its own") in found(
        spec, "rollout.drivers=2", "backend={kind: sglang, launch: {gpus: 0}}"
    )


def test_shards_of_one_driver(spec: Path) -> None:
    assert found(spec, "rollout.shards=/tmp/shards") == [
        ("rollout.shards", "`shards` has no effect with one driver: its rows stay in the run's store")
    ]


def test_an_evaluation(spec: Path) -> None:
    status, _, errors = engine_here("eval", spec, "--set", "rollout.drivers=2", cwd=spec.parent)
    assert status == 1
    assert "`engine eval` does not support several drivers; `engine run` does" in errors
    assert not (spec.parent / "runs").exists()


def test_a_run_of_one_process_is_not_continued_by_several(spec: Path) -> None:
    assert engine_here("run", spec, "-q", cwd=spec.parent)[0] == 0
    status, _, errors = engine_here("run", "--resume", "latest", "--drivers", "2", cwd=spec.parent)
    assert status == 1
    assert "was begun by one process, and is continued by one: leave out --drivers" in errors


def test_without_ray_the_command_says_what_to_install(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    status, _, errors = engine_here("run", spec, "--drivers", "2", cwd=spec.parent)
    assert status == 1
    assert "`rollout.drivers` needs Ray: pip install 'episode-engine[ray]', or run one driver (--drivers 1)" in errors
