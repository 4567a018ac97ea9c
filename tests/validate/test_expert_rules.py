"""What `validate` says about the experts of a model, from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.spec.load import load_spec
from engine.validate import check_spec

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


@pytest.mark.parametrize(
    ("config", "changes", "found"),
    [
        (EXPERTS | {"model_type": "qwen3_moe"}, {"backend": SERVER, "train": {}}, ["train.expert-routing"]),
        (EXPERTS | {"model_type": "qwen3_moe"}, {"train": {}}, ["train.expert-routing"]),
        (EXPERTS | {"model_type": "qwen3_moe"}, {"backend": SERVER | {"routed_experts": True}, "train": {}}, []),
        (EXPERTS | {"model_type": "other"}, {"backend": SERVER | {"routed_experts": True}, "train": {}}, ["train.expert-routing"]),
        (EXPERTS | {"model_type": "other"}, {"backend": SERVER | {"routed_experts": True}}, []),
        (EXPERTS | {"model_type": "qwen3_moe"}, {"backend": SERVER}, []),
        ({"model_type": "qwen3"}, {"backend": SERVER, "train": {}}, []),
        ({"model_type": "qwen3"}, {"backend": SERVER | {"routed_experts": True}}, ["backend.no-experts"]),
    ],
)  # fmt: skip
def test_findings_about_experts(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], found: list[str]
) -> None:
    ids = [item.rule for item in check_spec(loaded(tmp_path, config, **changes))]
    assert [name for name in ids if "expert" in name] == found
