"""Running specs on the scripted backend with a tiny real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
import yaml
from book_kit import BOOK
from validated_structs import structs_validated

from engine.backends.registry import open_backend
from engine.runner.run import Runner, RunResult
from engine.schemas.trajectory import Trajectory
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.format import ChatFormat
from engine.tokens.loading import load_format


@dataclass
class Ran:
    """A run that was made."""

    loaded: LoadedSpec
    form: ChatFormat
    store: RunStore
    result: RunResult
    runner: Runner

    @property
    def trajectories(self) -> dict[str, Trajectory]:
        return {trajectory.episode_id: trajectory for trajectory in self.store.trajectories()}

    @property
    def only(self) -> Trajectory:
        (trajectory,) = self.store.trajectories()
        return trajectory


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    """What the engine makes without validation must be what validation would make of it."""
    with structs_validated():
        yield


@pytest.fixture(autouse=True)
def _fresh_spec_code() -> Iterator[None]:
    spec_code.CALLS.clear()
    spec_code.ON_CALL.clear()
    spec_code.ACTIVE.clear()
    spec_code.MAX_ACTIVE.clear()
    spec_code.GATE.clear()
    yield
    spec_code.GATE.set()


@pytest.fixture
def make_spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Path]:
    """Write a spec: the scripted backend, one task, and what the test changes."""

    def make(replies: Any, name: str = "spec", **changes: Any) -> Path:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": name,
            "model": {"path": str(tiny_tokenizer_dir), "tool_calls": "hermes"},
            "backend": {"kind": "scripted", "replies": replies},
            "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
            "prompt": [{"role": "user", "content": "What is 17 plus 25?"}],
            "tools": [{"use": f"code_for_tests:{tool}"} for tool in ("add", "wait", "explode", "hang", "pay")],
            "user": {"use": "code_for_tests:Critic"},
            "rollout": {"seed": 7},
        }
        for key, value in changes.items():
            if value is None:
                spec.pop(key, None)
            elif isinstance(value, dict) and isinstance(spec.get(key), dict) and key != "user":
                spec[key] = spec[key] | value
            else:
                spec[key] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    return make


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec to its end and leave its store open for reading."""

    async def run(path: Path, **kwargs: Any) -> Ran:
        loaded = load_spec(path)
        form = load_format(loaded.spec.model, loaded.base)
        backend = open_backend(loaded, form)
        await backend.start()
        store = RunStore.create(tmp_path / "runs", RunHeader.of(loaded))
        runner = Runner(loaded, load_tasks(loaded), form, backend, store)
        try:
            result = await runner.run(**kwargs)
        finally:
            await backend.close()
            store.close()
        return Ran(loaded, form, RunStore.open(store.folder, readonly=True), result, runner)

    return run


@pytest.fixture
def play_book(make_spec: Callable[..., Path], run_spec: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Run one episode that reads pages of a book under a short context, and return what ran."""

    async def play(replies: list[Any], **changes: Any) -> Ran:
        (tmp_path / "book.py").write_text(BOOK)
        limits = {"episode_tokens": 1300, "turn_tokens": 60, "assistant_turns": 40, "on_overflow": "condense"}
        base: dict[str, Any] = {
            "user": None,
            "prompt": [{"role": "user", "content": "Read the book."}],
            "tools": [{"use": "book:read"}],
            "machine": "tools",
            "limits": limits | changes.pop("limits", {}),
        }
        return await run_spec(make_spec(replies, **(base | changes)))

    return play
