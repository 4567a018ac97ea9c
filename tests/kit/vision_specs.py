"""Fixtures that run specs on tiny vision-language models. A conftest imports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vision_kit
from ended_runs import run_to_end
from written_specs import save_spec


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = vision_kit.BUILDERS[family](tmp_path_factory.mktemp(family) / family)
        return made[family]

    return get


@pytest.fixture
def make_spec(tmp_path: Path, vlm: Callable[[str], Path]) -> Callable[..., Path]:
    """Write a spec for a family, with what the test changes."""

    def make(family: str, replies: Any = None, model: dict[str, Any] | None = None, **changes: Any) -> Path:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": "seen",
            "model": {"path": str(vlm(family)), **(model or {})},
            "backend": {"kind": "local", "device": "cpu", "dtype": "float32"}
            if replies is None
            else {"kind": "scripted", "replies": replies},
            "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
            "limits": {"turn_tokens": 12},
            "rollout": {"seed": 7},
        } | changes
        return save_spec(tmp_path / "seen.yaml", spec)

    return make


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec to its end and leave its store open for reading."""

    return lambda path, template=None: run_to_end(path, tmp_path / "runs", template=template)
