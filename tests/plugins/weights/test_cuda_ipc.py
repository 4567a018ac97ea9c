"""CUDA IPC of `method: tensors`: when it is chosen, and what a message holds. There is no GPU here: torch's reduction of a CUDA tensor is
given, as it is documented in torch/multiprocessing/reductions.py; the rest is real.
"""

from __future__ import annotations

import base64
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from engine.errors import TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.shared_tensors import DeviceBuffer, SharedBlock
from engine.plugins.weights.sync_sglang import TensorSync, _launched_gpus
from engine.schemas.backend import LaunchSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format

UUID = "0a1b2c3d-0000-1111-2222-333344445555"
ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
}
"""The globals of such a message, all of which SGLang's `SafeUnpickler` allows."""


def cuda_reduction(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What torch's `reduce_tensor` returns for a tensor of GPU 1."""
    values = (
        torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), torch.UntypedStorage, tensor.dtype,
        1, b"memory handle", 4096, 512, False, b"counter handle", 3, b"event handle", True,
    )  # fmt: skip
    return reductions.rebuild_cuda_tensor, values


class Strict(pickle.Unpickler):
    """Refuses every other global, and notes how tensors would be rebuilt."""

    rebuilt: list[tuple[Any, ...]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"global '{module}.{name}' is forbidden")
        if name == "rebuild_cuda_tensor":
            return lambda *values: self.rebuilt.append(values) or len(self.rebuilt) - 1
        return super().find_class(module, name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "reduce_tensor", cuda_reduction)
    facts = {1: SimpleNamespace(uuid=UUID)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.__getitem__)


def message() -> str:
    buffer = DeviceBuffer(torch.device("cpu"))
    buffer.write([("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3, dtype=torch.bfloat16))])
    return buffer.serialize()


@pytest.mark.usefixtures("gpu")
def test_a_message_names_the_gpu_by_its_uuid_and_holds_handles_only() -> None:
    reader = Strict(io.BytesIO(base64.b64decode(message())))
    reader.rebuilt = []
    assert reader.load() == [("a", 0), ("b", 1)]
    for values, shape, dtype, offset in zip(
        reader.rebuilt, [(2, 3), (3,)], [torch.float32, torch.bfloat16], [0, 32], strict=True
    ):
        assert (tuple(values[1]), values[3], values[5]) == (shape, offset, dtype)
        assert values[6] == UUID
        assert values[7:] == (b"memory handle", 4096, 512, False, b"counter handle", 3, b"event handle", True)


def test_a_bucket_has_memory_of_its_own() -> None:
    """A server may still copy from the one before when it answers."""
    buffer = DeviceBuffer(torch.device("cpu"))
    buffer.write([("a", torch.zeros(2))])
    ((_, first),) = buffer.views
    buffer.write([("a", torch.ones(2))])
    assert first.tolist() == [0.0, 0.0]


def test_a_gpu_without_memory_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(TrainError, match="--mem-fraction-static") as caught:
        DeviceBuffer(torch.device("cuda", 0)).write([("a", torch.ones(2))])
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(
    ("device", "processes", "server", "gpus", "kind"),
    [
        ("cuda:1", 1, "cuda", [1], DeviceBuffer),
        ("cuda:1", 1, "cuda", [0, 1], DeviceBuffer),
        ("cuda", 1, "cuda", [1], DeviceBuffer),
        ("cuda:1", 1, "cuda", [0, 2], SharedBlock),
        ("cuda:1", 1, "cuda", None, SharedBlock),
        ("cuda:1", 2, "cuda", [1], SharedBlock),
        ("cuda:1", 1, "cpu", [1], SharedBlock),
        ("cpu", 1, "cuda", [1], SharedBlock),
    ],
)
def test_only_a_server_that_sees_the_gpu_of_the_only_process_reads_its_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, processes: int, server: str, gpus: list[int] | None, kind: type
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    group = SimpleNamespace(size=processes)
    policy: Any = SimpleNamespace(device=torch.device(device), net=SimpleNamespace(process_group=group))
    sync = TensorSync(SimpleNamespace(workers=[]), "retract", {} if gpus is None else {"http://a:1": gpus})  # type: ignore[arg-type]
    there: Any = SimpleNamespace(url="http://a:1")
    assert type(sync._buffer(there, {"device": server}, policy, 64)) is kind


@pytest.mark.parametrize(
    ("launch", "wanted"),
    [
        ({"gpus": 4, "tp": 2}, [[0, 1], [2, 3]]),
        ({"gpus": [3, 1], "tp": 1}, [[3], [1]]),
        ({"gpus": 0}, [[]]),
        (None, []),
    ],
)
def test_each_launched_server_sees_its_gpus(
    tiny_model_dir: Path, launch: dict[str, Any] | None, wanted: list[list[int]]
) -> None:
    urls = [f"http://127.0.0.1:{31000 + number}" for number in range(max(1, len(wanted)))]
    format = load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir)
    backend = SGLangBackend(SGLangBackendSpec(urls=urls), format, sampling=SamplingParams(), model="tiny")
    found = _launched_gpus(None if launch is None else LaunchSpec.model_validate(launch), backend)
    assert found == dict(zip(urls, wanted, strict=False))
