"""Several drivers share the limits of a summarising model's backend, and the workers of a condenser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.plugins.condense.spec import CondenseSpec
from engine.plugins.drivers.session import of_driver
from engine.spec.load import load_spec

API = {"kind": "openai", "url": "http://127.0.0.1:9", "model": "m", "requests_per_minute": 100}


@pytest.mark.parametrize(
    ("condenser", "parts"),
    [
        ({"kind": "summary", "backend": API}, {"backend": {"requests_per_minute": [34, 33, 33]}}),
        (
            {"kind": "own", "use": "book:shorten", "isolation": {"mode": "process", "workers": 4}},
            {"isolation": {"workers": [2, 1, 1]}},
        ),
    ],
)
def test_each_driver_has_its_part(condenser: dict[str, Any], parts: dict[str, Any], tmp_path: Path) -> None:
    spec = {
        "spec": "episode/v1",
        "name": "shared",
        "model": {"path": "org/m"},
        "backend": {"kind": "scripted", "replies": ["x"]},
        "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
        "condense": {"condenser": condenser},
        "limits": {"on_overflow": "condense"},
        "rollout": {"drivers": 3},
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(spec))
    loaded = load_spec(tmp_path / "s.yaml")
    driven = [CondenseSpec.or_default(of_driver(loaded, 3, slot).spec).condenser.model_dump() for slot in range(3)]
    for part, limits in parts.items():
        for name, values in limits.items():
            assert [each[part][name] for each in driven] == values
