"""Routed experts of the real server: in rows, on disk, after a resume, and in the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_moe
import yaml
from test_episodes_served import played, write_spec
from trainings import begin_training, metric_lines

from engine.plugins.sglang.checks import EXPERTS_FLAG
from engine.runner.replay import Replayer
from engine.schemas.train import TrainSpec
from engine.spec.load import load_spec
from engine.store.rows.export import training_rows
from engine.train.policy import Policy
from engine.train.verify import recompute

Running = Any


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe.build(tmp_path_factory.mktemp("moe") / "tiny-moe", ties=True)


@pytest.fixture(scope="module")
def server(
    model: Path, server_of: Callable[..., AbstractContextManager[Running]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with server_of(model, tmp_path_factory.mktemp("moe-server"), EXPERTS_FLAG, lora=False) as found:
        yield found


@pytest.fixture(autouse=True)
def no_cached_prefixes(server: Running) -> None:
    """Tests have the same prompts."""
    assert httpx.post(f"{server.url}/flush_cache", timeout=60).status_code == 200


def spec_of(folder: Path, model: Path, server: Running, routed_experts: bool | str, **rollout: Any) -> Path:
    served = {"kind": "sglang", "urls": [server.url], "routed_experts": routed_experts}
    return write_spec(folder, model, served, sampling={"temperature": 1.0}, rollout=rollout)


def policy_of(model: Path, vocab: int, *, replay: bool) -> Policy:
    train = TrainSpec.model_validate({"device": "cpu"})
    return Policy.load(model, train, temperature=1.0, vocab=vocab, vision=None, replay_experts=replay)


@pytest.mark.parametrize(
    ("routed_experts", "rollout"),
    [("exact", {"samples_per_task": 3}), (True, {"live_episodes": 1})],
    ids=["groups, exact", "one episode at a time"],
)
async def test_the_trainer_uses_the_experts_of_the_server(
    server: Running, model: Path, tmp_path: Path, routed_experts: bool | str, rollout: dict[str, int]
) -> None:
    """Log-probs with the server's experts equal the server's to 1e-4; with the trainer's own, near ties, they do not."""
    path = spec_of(tmp_path, model, server, routed_experts, **rollout)
    loaded, form, store, result, _ = await played(path, tmp_path)
    assert result.faults == []
    rows = list(training_rows(store, trainable_only=True))
    assert len({row.episode.episode_id for row in rows}) == 4 * rollout.get("samples_per_task", 1)
    for row in rows:
        experts = row.branch.routed_experts
        assert experts is not None
        assert experts.shape == (int(row.places[-1]), 3, 3)
        assert experts.dtype == np.uint8
    for most in (8192, 200):
        assert recompute(policy_of(model, form.vocab_size, replay=True), rows, most).largest < 1e-4
    assert recompute(policy_of(model, form.vocab_size, replay=False), rows).largest > 1e-2
    replayer = Replayer(loaded, form, store)
    for trajectory in store.trajectories():
        assert (await replayer.check(trajectory, store.task(trajectory.task_id))).difference is None
    replayer.close()


@pytest.mark.slow
async def test_a_training_uses_the_experts_of_each_step(server: Running, model: Path, tmp_path: Path) -> None:
    """Also after a push of weights, which drops the cached prefixes with their experts."""
    spec = yaml.safe_load(spec_of(tmp_path, model, server, "exact", samples_per_task=3).read_text())
    spec["train"] = {"steps": 2, "tasks_per_step": 2, "dynamic_sampling": False, "optimizer": {"lr": 0.01}}
    spec["train"]["advantage_bonuses"] = [{"use": "code_on_sglang:by_token"}]
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(spec))
    loaded = load_spec(path, [])
    trainer = begin_training(loaded, tmp_path / "runs")
    await trainer.run()
    steps = metric_lines(trainer.folder)
    assert len(steps) == 2
    assert all(step["sampler/diff_max"] < 1e-4 and step["grad_norm"] > 0 for step in steps)
