"""A training on a mix of task sources: shares, metrics, and the same training after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_surviving import EXACT, Killed, kill_at, lines, sampled, trained
from trainings import begin_training, policy_weights, resume_training

from engine.runner.runner import Runner
from engine.train.batch_log import BatchLog
from engine.train.metrics import read_metrics

MIX = {
    "source": "mix",
    "mix": {
        "often": {"source": "inline", "rows": [{"say": f"word {n}"} for n in range(3)], "weight": 3},
        "rarely": {"source": "inline", "rows": [{"say": f"number {n}"} for n in range(5)]},
    },
}


@pytest.fixture
def mixed_spec(train_spec: Any) -> Any:
    def make(**train: Any) -> Path:
        backend = {"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True}
        settings = EXACT | {"tasks_per_step": 4, "dynamic_sampling": False} | train
        return Path(train_spec(train=settings, backend=backend, tasks=MIX))

    return make


@pytest.mark.slow
async def test_a_killed_training_on_a_mix_is_the_one_that_was_not_killed(
    mixed_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin_training(mixed_spec(), tmp_path / "whole")
    await whole.run()
    counts = [
        {name.split("/")[1]: value for name, value in line.items() if name.endswith("/episodes") and "source" in name}
        for line in read_metrics(whole.folder)
    ]
    assert counts == [{"often": 12.0, "rarely": 4.0}] * 3  # four groups of four episodes, three to one
    first = read_metrics(whole.folder)[0]
    parts = [first[f"source/{name}/reward"] * share for name, share in (("often", 0.75), ("rarely", 0.25))]
    assert sum(parts) == pytest.approx(first["reward/mean"])

    parted = begin_training(mixed_spec(), tmp_path / "parted")
    with monkeypatch.context() as patch:
        kill_at(patch, Runner, "count", 23, after=False)  # in the middle of the second batch
        with pytest.raises(Killed):
            await parted.run()
    again = resume_training(parted.folder)
    assert (await again.run()).steps == 3
    assert (lines(again), trained(again)) == (lines(whole), trained(whole))
    tasks = [{name.partition("~")[0] for name in record.tasks.values()} for record in BatchLog(again.folder).read()]
    assert set().union(*tasks) >= {"often:0", "often:1", "often:2"}
    assert all(
        bool((policy_weights(again.folder)[name] == tensor).all())
        for name, tensor in policy_weights(whole.folder).items()
    )
    assert set(sampled(again).values()) == {1}
