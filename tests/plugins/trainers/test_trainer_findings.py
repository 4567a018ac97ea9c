"""What `engine validate --trainer` says of experts, and adapters of several drivers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_kit import ask, serving, unpacked, written
from written_specs import save_spec, scripted_spec

from engine.errors import SpecError
from engine.plugins.trainers.capabilities import TRAINERS
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.spec.load import load_spec

EXPERTS = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
SERVER = {"kind": "sglang", "urls": ["http://127.0.0.1:30000"]}


def loaded(folder: Path, config: dict[str, Any], **changes: Any) -> Any:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(config))
    spec = {
        "spec": "episode/v1", "name": "demo", "model": {"path": "m"}, "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}], "machine": "single_turn", "rollout": {"samples_per_task": 8}, **changes,
    }  # fmt: skip
    (folder / "s.yaml").write_text(yaml.safe_dump(spec))
    return load_spec(folder / "s.yaml")


def test_trainers_that_carry_no_routing_are_named(tmp_path: Path) -> None:
    spec = loaded(tmp_path, EXPERTS, backend=SERVER | {"routed_experts": True})
    path = ("backend", "routed_experts")
    rules = {
        name: [item.rule for item in TRAINERS[name].findings(spec) if item.path == path]
        for name in ("verl", "slime", "skyrl", "trl", "areal")
    }
    carried: dict[str, list[str]] = {"verl": [], "slime": [], "skyrl": []}
    assert rules == carried | {"trl": ["trainer.refused"], "areal": ["trainer.refused"]}


@pytest.fixture
def spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    return save_spec(
        tmp_path / "spec.yaml",
        {
            **scripted_spec("many", tiny_tokenizer_dir, ["Four."], [{"id": "a"}], ask="What is 2 plus 2?"),
            "machine": "tools",
        },
    )


def test_adapters_of_trainers(spec: Path) -> None:
    loaded = load_spec(spec, ["rollout.drivers=2"])
    for trainer in ("trl", "slime", "verl"):
        with pytest.raises(SpecError, match=f"the adapter for {trainer} does not support several drivers"):
            TrainerRollouts(loaded, spec.parent / "training", trainer)


@pytest.mark.parametrize(
    ("trainer", "status", "words"),
    [("verll", 400, "did you mean `verl`?"), ("art", 409, "ART openpipe-art 0.5.18: not carried: ")],
)
async def test_a_group_for_a_trainer_that_cannot_take_it_is_refused(
    trainer: str, status: int, words: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    unpacked(tmp_path_factory.mktemp("tokenizer"))
    async with serving(written(tmp_path)) as (_, address):
        found, error = await ask(address, "/groups", {"id": "a", "trainer": trainer})
    assert (found, words in error["message"]) == (status, True)
