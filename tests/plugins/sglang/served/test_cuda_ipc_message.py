"""SGLang's own reader takes the messages of CUDA IPC. torch's reduction of a CUDA tensor and the opening of a handle are given: there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cuda_ipc import UUID, cuda_reduction, message
from torch.multiprocessing import reductions

READ = """
import json, sys
from types import SimpleNamespace

import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch.multiprocessing import reductions

monkey_patch_torch_reductions()
opened = []
reductions._rebuild_cuda_tensor_original = lambda *values: opened.append(values) or torch.zeros(1)
gpus = [SimpleNamespace(uuid="another"), SimpleNamespace(uuid="one more"), SimpleNamespace(uuid=sys.argv[1])]
torch.cuda.device_count, torch.cuda.get_device_properties = (lambda: 3), gpus.__getitem__
named = MultiprocessingSerializer.deserialize(sys.stdin.read())
print(json.dumps([[name, list(v[1]), v[3], str(v[5]), v[6], v[7].decode()] for (name, _), v in zip(named, opened)]))
"""


@pytest.mark.slow
def test_sglang_opens_the_handles_on_its_own_index_of_the_gpu(
    sglang_interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions, "reduce_tensor", cuda_reduction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: SimpleNamespace(uuid=UUID)}.__getitem__)
    paths = str(Path(__file__).parents[4] / "scripts" / "sglang_cpu")
    done = subprocess.run(
        [sglang_interpreter, "-c", READ, UUID],
        input=message(),
        env={**os.environ, "PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    opened: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert opened == [
        ["a", [2, 3], 0, "torch.float32", 2, "memory handle"],
        ["b", [3], 32, "torch.bfloat16", 2, "memory handle"],
    ]
