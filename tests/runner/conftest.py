"""Running specs on the scripted backend with a tiny real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from book_kit import BOOK
from ended_runs import Ran, run_to_end
from validated_structs import structs_validated
from written_specs import save_spec, scripted_spec


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
            **scripted_spec(name, tiny_tokenizer_dir, replies, [{"id": "a"}]),
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
        return save_spec(tmp_path / f"{name}.yaml", spec)

    return make


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec to its end and leave its store open for reading."""

    return lambda path, **options: run_to_end(path, tmp_path / "runs", **options)


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
