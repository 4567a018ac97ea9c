"""One real vLLM server for the suite, on the CPU, with a tiny model."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "vllm_cpu.sh"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the server."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.vllm)


def vllm_python() -> Path:
    """The interpreter of vLLM's own environment. Without one the test is skipped."""
    python = Path(subprocess.run([SCRIPT, "python"], capture_output=True, text=True, check=True).stdout.strip())
    if not python.exists():
        pytest.skip(f"vLLM is not installed ({python} is not there): run scripts/vllm_cpu.sh install")
    return python


@pytest.fixture(scope="session")
def vllm_interpreter() -> Path:
    """The interpreter of vLLM's own environment."""
    return vllm_python()


@contextmanager
def served(model: Path, state: Path, *flags: str) -> Iterator[str]:
    """The URL of a server with this model, until the block ends."""
    vllm_python()
    environment = {**os.environ, "VLLM_CPU_STATE": str(state)}
    started = subprocess.run([SCRIPT, "start", model, *flags], env=environment, capture_output=True, text=True)
    if started.returncode:
        pytest.fail(f"the vLLM server did not start:\n{started.stderr[-4000:]}")
    url = started.stdout.strip().splitlines()[-1]
    try:
        yield url
    finally:
        port = url.rpartition(":")[2]
        subprocess.run([SCRIPT, "stop", "--port", port], env=environment, capture_output=True, check=False)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of 32 numbers: vLLM's attention for the CPU has no smaller ones."""
    from engine.plugins.local.tiny_lm import build

    return build(tmp_path_factory.mktemp("model") / "lm", hidden_size=128)


@pytest.fixture(scope="session")
def vllm_url(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The suite's server. It reports log-probs after temperature and biases."""
    with served(served_model, tmp_path_factory.mktemp("vllm"), "--logprobs-mode", "processed_logprobs") as url:
        yield url
