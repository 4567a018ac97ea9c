"""Two processes train a model that sees, and only the first has the images."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import process_group_vision_worker as worker
import pytest
import torch
from safetensors.torch import load_file
from test_policy_vision import gallery_rows

from engine.store.loader import with_image_files
from engine.store.rows.export import write_jsonl
from engine.store.rows.row import TrainingRow, columns_of
from engine.tokens.vision import Vision
from engine.train.distributed import ProcessGroup


def write_with_bytes(rows: list[TrainingRow], vision: Vision, path: Path) -> None:
    """Write rows, and the encoded images in the folder `encoded` beside them."""
    write_jsonl(columns_of(rows), path)
    (path.parent / "encoded").mkdir()
    for digest in {image.image for row in rows for image in row.branch.images}:
        (path.parent / "encoded" / digest[7:]).write_bytes(vision.bank.source(digest).data)


@pytest.mark.slow
async def test_a_step_is_the_same_if_workers_scale_its_images(
    make_spec: Any, run_spec: Any, vlm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, "qwen2_5_vl")
    write_with_bytes(rows, vision, tmp_path / "rows.jsonl")
    alone = worker.told_by(ProcessGroup(), vlm("qwen2_5_vl"), tmp_path / "rows.jsonl")
    banks = []

    def give_at_once(vision: Vision, path: Path) -> None:
        give(vision, path)
        vision.bank._after = 0.0
        banks.append(vision.bank)

    give = worker.give_images
    monkeypatch.setattr(worker, "give_images", give_at_once)
    helped = worker.told_by(ProcessGroup(), vlm("qwen2_5_vl"), tmp_path / "rows.jsonl")
    assert helped[0] == alone[0]
    assert all(torch.equal(tensor, alone[1][name]) for name, tensor in helped[1].items())
    assert banks[0]._ahead._workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "tokens", "encoded"),
    [
        ("bytes of a run", 1, [3, 3, 3]),
        pytest.param("tensors beside rows", 1, [3, 3, 3], marks=pytest.mark.exhaustive),
        pytest.param("bytes of a run", 200, [3, 3], marks=pytest.mark.exhaustive),
    ],
)
async def test_two_processes_train_a_model_that_sees(
    make_spec: Any, run_spec: Any, vlm: Any, tmp_path: Path, images: str, tokens: int, encoded: list[int]
) -> None:
    """Images reach the process that did not sample them, and a pass that sees nothing keeps step with one that does.

    A pass over several rows encodes an image once in each process, as in one."""
    rows, vision = await gallery_rows(make_spec, run_spec, "qwen2_5_vl")
    assert len(rows) == 2
    path = tmp_path / "rows.jsonl"
    if images == "bytes of a run":
        write_with_bytes(rows, vision, path)
    else:
        write_jsonl(with_image_files(columns_of(rows), path, lambda: vision), path)
    root = Path(worker.__file__).parents[3]
    arguments = [str(each) for each in (vlm("qwen2_5_vl"), path, tmp_path, tokens)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker.__file__]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *launch, *arguments],
        env=os.environ
        | {"PYTHONPATH": f"{root}:{root / 'tests/kit'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = worker.told_by(ProcessGroup(), vlm("qwen2_5_vl"), path, tokens)
    assert sorted(found[2]) == encoded
    by_process = [json.loads((tmp_path / f"encoded-{rank}.json").read_text()) for rank in range(2)]
    assert sorted(images for process in by_process for images in process) == encoded
    assert all(by_process)
    assert found[0]["images/encoded"] == pytest.approx(sum(encoded) / 12)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.pop("processes") == 2
    assert told == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    tensors = load_file(tmp_path / "told.safetensors")
    assert tensors.keys() == found[1].keys()
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6)
