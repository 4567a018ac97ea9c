"""The episodes that `engine train` trained on, through slime's converter and advantage function: the same advantages by token."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slime_kit import Sample, arrived

from engine.plugins.trainers.slime import advantages, convert
from engine.plugins.trainers.slime.rows import origin_of, samples_of
from engine.store import RunStore

pytestmark = [pytest.mark.slow, pytest.mark.trainers]


@pytest.mark.parametrize(("which", "episodes"), [("single", 48), ("several", 16)])
def test_slime(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, episodes: int
) -> None:
    """Megatron's parallel state and the slicing for context parallelism are stand-ins of one process."""
    recorded: Any = request.getfixturevalue(which)
    core, cp_utils = ModuleType("megatron.core"), ModuleType("slime.backends.megatron_utils.cp_utils")
    core.mpu = SimpleNamespace(get_data_parallel_world_size=lambda with_context_parallel: 1)  # type: ignore[attr-defined]
    cp_utils.slice_log_prob_with_cp = lambda values, total, response: values  # type: ignore[attr-defined]
    for name in ("megatron", "slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.cp_utils", cp_utils)
    (folder,) = recorded.spec.parent.glob("runs/*/rollouts")
    store = RunStore.open(folder, readonly=True)
    ended = list(store.trajectories())
    assert len(ended) == episodes
    args = SimpleNamespace(engine_spec=str(recorded.spec), engine_folder=str(tmp_path), global_batch_size=episodes)
    samples = [
        sample
        for at, each in enumerate(ended)
        for sample in samples_of(Sample(each.task_id, at), each, lambda ids: "", None)
    ]
    rollout = arrived(convert(args, samples))
    advantages(args, rollout)
    rows = {(row["episode_id"], row["branch"]): row for row in recorded.rows}
    for sample, values in zip(samples, rollout["advantages"], strict=True):
        origin = origin_of(sample)
        assert origin is not None
        assert origin.trajectory is not None
        row = rows.pop((origin.trajectory.episode_id, origin.branch), None)
        if row is None:
            assert not values.any()
            continue
        assert np.allclose(values.numpy(), row["advantages"][origin.start :], rtol=0, atol=1e-6)
        assert not row["advantages"][: origin.start].any()
    assert not rows
