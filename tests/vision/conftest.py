"""Running specs on tiny vision-language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vision_kit
import yaml

from engine.backends.base import Backend
from engine.backends.registry import open_backend
from engine.runner.run import Runner, RunResult
from engine.schemas.trajectory import Trajectory
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.format import ChatFormat
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision


@dataclass
class Ran:
    """A run that was made."""

    loaded: LoadedSpec
    form: ChatFormat
    store: RunStore
    result: RunResult
    stats: dict[str, Any]

    @property
    def vision(self) -> Vision:
        assert self.form.vision is not None
        return self.form.vision

    @property
    def trajectories(self) -> dict[str, Trajectory]:
        return {trajectory.episode_id: trajectory for trajectory in self.store.trajectories()}

    @property
    def only(self) -> Trajectory:
        (trajectory,) = self.store.trajectories()
        return trajectory


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
        path = tmp_path / "seen.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    return make


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec to its end and leave its store open for reading."""

    async def run(path: Path, form: ChatFormat | None = None) -> Ran:
        loaded = load_spec(path)
        form = form or load_format(loaded.spec.model, loaded.base)
        backend: Backend = open_backend(loaded, form)
        await backend.start()
        store = RunStore.create(tmp_path / "runs", RunHeader.of(loaded))
        try:
            result = await Runner(loaded, load_tasks(loaded), form, backend, store).run()
            stats = backend.stats()
        finally:
            await backend.close()
            store.close()
        return Ran(loaded, form, RunStore.open(store.folder, readonly=True), result, stats)

    return run
