"""What is checked before anything is sent to servers, and tensors for another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sync import spec_of

from engine.errors import TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.weights.shared_tensors import SharedBlock, buckets, buffer_bytes
from engine.schemas.generation import SamplingParams
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.train.sync import open_sync


def serving(model: Path, url: str) -> SGLangBackend:
    return SGLangBackend(
        SGLangBackendSpec(urls=[url]),
        load_format(ModelSpec(path=str(model)), model),
        sampling=SamplingParams(),
        model=str(model),
    )


@pytest.mark.parametrize(
    ("url", "lora", "backend", "weight_sync", "said"),
    [
        (
            "http://192.0.2.1:30000",
            None,
            {},
            {"method": "tensors"},
            r"http://192\.0\.2\.1:30000 is not on this host: use `disk`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {},
            {"method": "adapter"},
            r"`train\.weight_sync\.method: adapter` needs `train\.lora`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {"adapter": "tutor"},
            {},
            r"`backend\.adapter: tutor` cannot be used with `train`",
        ),
        (
            "http://127.0.0.1:30000",
            {},
            {},
            {"method": "collective"},
            r"`train\.weight_sync\.method: collective` sends all weights, but only an adapter is trained",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {"router": True},
            {"method": "collective"},
            r"`train\.weight_sync\.method: collective` needs the servers themselves in `backend\.urls`",
        ),
        (
            "http://127.0.0.1:30000",
            None,
            {},
            {"method": "collective", "address": "192.0.2.1"},
            r"`train\.weight_sync\.address: 192\.0\.2\.1` is not an address of this host",
        ),
    ],
)
async def test_a_way_that_cannot_be_gone_is_an_error_at_the_start(
    tiny_model_dir: Path,
    tmp_path: Path,
    url: str,
    lora: Any,
    backend: dict[str, Any],
    weight_sync: dict[str, Any],
    said: str,
) -> None:
    spec = spec_of(tiny_model_dir, {"weight_sync": weight_sync}, {"kind": "sglang", "urls": [url], **backend})
    with pytest.raises(TrainError, match=said) as caught:
        open_sync(spec, serving(tiny_model_dir, url), tmp_path, lora=lora is not None)
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(
    ("lora", "weight_sync", "kind"),
    [
        (False, {}, "DiskSync"),
        (True, {}, "AdapterSync"),
        (True, {"method": "disk"}, "DiskSync"),
        (False, {"method": "tensors"}, "TensorSync"),
        (False, {"method": "collective"}, "CollectiveSync"),
    ],
)
async def test_auto_is_the_adapter_where_there_is_one_else_the_disk(
    tiny_model_dir: Path, tmp_path: Path, lora: bool, weight_sync: dict[str, Any], kind: str
) -> None:
    url = "http://localhost:30000"
    spec = spec_of(tiny_model_dir, {"weight_sync": weight_sync}, {"kind": "sglang", "urls": [url]})
    assert type(open_sync(spec, serving(tiny_model_dir, url), tmp_path, lora=lora)).__name__ == kind


async def test_trainings_that_share_a_folder_have_their_own_places_in_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    url = "http://127.0.0.1:30000"
    spec = spec_of(tiny_model_dir, {"weight_sync": {"folder": str(tmp_path)}}, {"kind": "sglang", "urls": [url]})
    sync = open_sync(spec, serving(tiny_model_dir, url), Path("runs/demo-train-1"), lora=False)
    assert sync.folder == (tmp_path / "demo-train-1").resolve()  # type: ignore[attr-defined]


# -- tensors for another process


@given(sizes=st.lists(st.integers(0, 9), max_size=20), most=st.integers(1, 30))
def test_buckets_keep_every_tensor_in_order_and_hold_no_more_than_they_may(sizes: list[int], most: int) -> None:
    weights = {f"w{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    pieces = list(buckets(weights, most))
    assert [name for piece in pieces for name, _ in piece] == list(weights)
    for piece in pieces:
        assert sum(tensor.nbytes for _, tensor in piece) <= most or len(piece) == 1


@pytest.mark.slow
def test_another_process_reads_what_was_shared() -> None:
    tensors = [
        ("a", torch.arange(12.0).reshape(3, 4).t()),
        ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(7)),
    ]
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    buffer = SharedBlock(buffer_bytes(tensors))
    assert torch.multiprocessing.get_sharing_strategy() == strategy  # type: ignore[no-untyped-call]
    read = (
        "import base64, pickle, sys, torch\n"
        "for line in sys.stdin:\n"
        "    found = pickle.loads(base64.b64decode(line))\n"
        "    print([(name, str(tensor.dtype), tensor.float().tolist()) for name, tensor in found], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", read], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for piece in (tensors, tensors[::-1], tensors[1:]):  # one after the other, in the same place
            buffer.write(piece)
            for _ in range(2):  # two readers of each
                reader.stdin.write(f"{buffer.serialize()}\n")
                wanted = [(name, str(tensor.dtype), tensor.float().tolist()) for name, tensor in piece]
                assert reader.stdout.readline() == f"{wanted}\n"
    assert reader.returncode == 0


def test_more_than_shared_memory_has_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TrainError, match=r"--shm-size\), or use `train.weight_sync.method: disk`") as caught:
        SharedBlock(1 << 50)
    assert caught.value.kind == "train_setup"
