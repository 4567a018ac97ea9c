"""64 episodes that `engine train` samples and trains on in one step, and the advantages by token that its loss reads."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_kit import FORGETFUL
from trainings import begin_training
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.spec.load import load_spec
from engine.train.learner import Learner

SAMPLES = 4


@dataclass(frozen=True)
class Recorded:
    """The rows of one step, as `Learner._update` got them."""

    spec: Path
    rows: list[dict[str, Any]]
    rewards: list[float]
    """The reward of each row's episode."""

    def file(self, path: Path) -> Path:
        """Write rows and rewards as JSON, for the Python of another environment."""
        names = ("input_ids", "loss_mask", "logprobs", "weight_versions", "advantages")
        rows = [
            {name: row[name].tolist() for name in names}
            | {name: row[name] for name in ("task_id", "episode_id", "sample_index", "branch")}
            | {"reward": reward}
            for row, reward in zip(self.rows, self.rewards, strict=True)
        ]
        path.write_text(json.dumps(rows))
        return path


def record(folder: Path, model: Path, tasks: int) -> Recorded:
    """Train one step with `engine train`, and keep what its update read."""
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "agree",
        "model": {"path": str(model)},
        "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "say": f"word {n}"} for n in range(tasks)], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "uneven_listener:UnevenListener"},
        "machine": TALKS_ON_WHEN_CUT,
        "limits": {"turn_tokens": 8, "assistant_turns": 2, "episode_tokens": 96},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": SAMPLES, "seed": 3},
        "train": {
            "steps": 1,
            "tasks_per_step": tasks,
            "device": "cpu",
            "dynamic_sampling": False,
            "rollout_correction": {"kind": "none"},
        },
    }
    path = save_spec(folder / "spec.yaml", spec)
    loaded = load_spec(path)
    seen: list[dict[str, Any]] = []
    update = Learner._update

    def watched(self: Any, columns: Any, *others: Any, **rest: Any) -> Any:
        seen.extend(of.row.columns() | {"advantages": of.row.on_tokens(of.advantages)} for of in columns)
        return update(self, columns, *others, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "_update", watched)
        asyncio.run(begin_training(loaded, folder / "runs").run())
    seen.sort(key=lambda row: (int(row["task_id"][1:]), row["sample_index"], row["branch"]))
    return Recorded(path, seen, [float(sum(row["turn_rewards"])) for row in seen])


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Recorded:
    """48 episodes in 12 groups, with one row each."""
    return record(tmp_path_factory.mktemp("single"), tiny_model_dir, 12)


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Recorded:
    """16 episodes in 4 groups, with a row for each turn."""
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(tiny_model_dir, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(FORGETFUL)
    return record(folder, folder / "model", 4)


def trained(row: dict[str, Any]) -> np.ndarray:
    """The advantages of a row's trained tokens, float32."""
    found: np.ndarray = np.asarray(row["advantages"], np.float32)[np.asarray(row["loss_mask"]) == 1]
    return found
