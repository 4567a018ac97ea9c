"""Fixtures that run specs on the scripted backend with a tiny real tokenizer; a conftest.py imports those that its tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from changed_specs import changed_spec
from ended_runs import run_to_end
from validated_structs import structs_validated


@pytest.fixture(autouse=True)
def structs_checked() -> Iterator[None]:
    """What the engine makes without validation must be what validation would make of it."""
    with structs_validated():
        yield


@pytest.fixture(autouse=True)
def fresh_spec_code() -> Iterator[None]:
    """The spec code of tests counts anew, and its gate is open in the end."""
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
    return partial(changed_spec, tmp_path, tiny_tokenizer_dir)


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec to its end and leave its store open for reading."""

    return lambda path, **options: run_to_end(path, tmp_path / "runs", **options)
