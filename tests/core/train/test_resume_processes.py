"""A sharded training is resumed with another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainings import metric_lines

from engine.train.checkpoint import checkpoints_of

HERE = Path(__file__).parent
KINDS: dict[str, dict[str, Any]] = {
    "kl": {"train": {"kl": {"coefficient": 0.1}}},
    "network": {
        "train": {"critic": {"kind": "network"}, "dynamic_sampling": False},
        "rewards": {"credit": {"method": "gae"}},
    },
}


def launch(processes: int, *arguments: str) -> None:
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--nproc-per-node", str(processes), "--standalone", "-m"]
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[2]}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, "engine.cli.main", "train", *arguments, "--quiet"],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.exhaustive
def test_two_four_and_two_processes_train_as_one(kind: str, train_spec: Any, tmp_path: Path) -> None:
    """Weights, moments, the KL reference and a critic are sharded, and each launch reads the checkpoint of the one before."""
    changes = KINDS[kind]
    train = {"steps": 2, "checkpoints": {"every": 2}, "rollout_correction": {"kind": "none"}} | changes["train"]
    spec = str(train_spec("spec", train=train, **{key: value for key, value in changes.items() if key != "train"}))
    out = ["--out", str(tmp_path / "runs")]
    launch(1, spec, *out, "--run-name", "alone", "--set", "train.steps=6")
    launch(2, spec, *out, "--run-name", "several")
    folder = tmp_path / "runs/several"
    for processes, steps in ((4, 4), (2, 6)):
        (checkpoint,) = checkpoints_of(folder)[-1:]
        before = 2 if processes == 4 else 4
        assert len(list((checkpoint / "policy").iterdir())) == before
        launch(processes, "--resume", str(folder), "--set", f"train.steps={steps}")
    wanted, found = metric_lines(tmp_path / "runs/alone"), metric_lines(folder)
    assert [line["step"] for line in found] == [line["step"] for line in wanted] == list(range(1, 7))
    for line, alone in zip(found, wanted, strict=True):
        for name in alone:
            if name in ("loss", "grad_norm", "reward/mean") or name.startswith(("policy/", "critic/")):
                assert line[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), (line["step"], name)
    assert any(abs(line["loss"]) > 1e-4 for line in found)
