"""One real SGLang server for the suite, on the CPU, with the tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sglang_interpreter import SCRIPT, sglang_python

FLAGS = [
    "--deterministic",
    "--enable-metrics",
]
LORA_FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native"]
LORA_FLAGS += ["--lora-target-modules", "q_proj", "v_proj"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the server."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.sglang)


@dataclass
class Running:
    """A server."""

    url: str
    state: Path

    def kill(self) -> None:
        """As `kill -9` of all of its processes."""
        os.killpg(int((self.state / f"{self.url.rpartition(':')[2]}.pid").read_text()), signal.SIGKILL)


@pytest.fixture(scope="session")
def sglang_interpreter() -> Path:
    """The interpreter of SGLang's own environment."""
    return sglang_python()


@contextmanager
def running(model: Path, state: Path, *flags: str, lora: bool = True) -> Iterator[Running]:
    """A server with this model until the block ends, which takes adapters with `lora`."""
    sglang_python()
    environment = {**os.environ, "SGLANG_CPU_STATE": str(state), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    started = subprocess.run(
        [SCRIPT, "start", model, *FLAGS, *(LORA_FLAGS if lora else []), *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if started.returncode:
        pytest.fail(f"the SGLang server did not start:\n{started.stderr[-4000:]}")
    url = started.stdout.strip().splitlines()[-1]
    try:
        yield Running(url, state)
    finally:
        port = url.rpartition(":")[2]
        subprocess.run([SCRIPT, "stop", "--port", port], env=environment, capture_output=True, check=False)


@pytest.fixture(scope="session")
def server_of() -> Callable[..., AbstractContextManager[Running]]:
    """See `running`."""
    return running


@pytest.fixture(scope="session")
def sglang_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The suite's server. Its weights may be other than the model's folder after a test; see `at_first`."""
    with running(tiny_model_dir, tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """The tiny model with other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    builder: Callable[..., Path] = _conftest().build_model
    folder = builder(tmp_path_factory.mktemp("other"), tiny_tokenizer_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny model: rank 4 on q_proj and v_proj of both layers, none of it zero."""
    import json

    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny", "inference_mode": True,
        "fan_in_fan_out": False, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(2)
    tensors = {}
    for layer in range(2):
        for name, out in (("q_proj", 64), ("v_proj", 32)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, 64) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, 4) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _conftest() -> object:
    import importlib.util

    spec = importlib.util.spec_from_file_location("shared_conftest", Path(__file__).parents[3] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def second_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Another server with the same model, for one test, which may kill it; heavy, for slow tests alone."""
    with running(tiny_model_dir, tmp_path_factory.mktemp("sglang-2")) as server:
        yield server


@pytest.fixture(scope="session")
def router_python() -> Path:
    """The interpreter of an environment that has sglang-router."""
    python = sglang_python()
    if subprocess.run([python, "-c", "import sglang_router"], capture_output=True, check=False).returncode:
        message = "sglang-router is not installed; remove SGLang's environment and run scripts/sglang_cpu.sh install"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return python


@pytest.fixture
def own_weights(sglang_server: Running, tiny_model_dir: Path) -> Iterator[None]:
    """The server has the model's own weights again when the test is over."""
    yield
    import httpx

    body = {"model_path": str(tiny_model_dir), "weight_version": "0", "flush_cache": True}
    assert httpx.post(f"{sglang_server.url}/update_weights_from_disk", json=body, timeout=120).json()["success"]
