"""Two processes come to what one comes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from installed_plugins import needs_plugin
from safetensors.torch import load_file
from torch import nn

from engine.errors import TrainError
from engine.train.checkpoint import read_checkpoint
from engine.train.distributed import ProcessGroup, ShardedProcessGroup, join_process_group

sys.path.append(str(Path(__file__).parent))
from process_group_worker import (
    learner_of,
    rows_for,
    save_model,
    save_model_with_experts,
    state_in,
    told_by,
    weights_of,
)

HERE = Path(__file__).parent
DEEP = {"layers": 12, "width": 4}
"""One layer and the embeddings are a small part of the model, and activations of a short row are small beside it."""
WORKER = HERE / "process_group_worker.py"


def launched(launcher: str, folder: Path, kind: str, processes: int) -> list[str]:
    if launcher == "torchrun":
        first = ["torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    else:
        # `--cpu` would be one process without MPI; without a GPU these two are on the CPU all the same.
        first = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
        first += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return [sys.executable, "-m", *first, str(WORKER), str(folder), kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "kind", "processes"),
    [
        ("accelerate", "lora", 2),
        ("torchrun", "kl", 4),
        pytest.param("torchrun", "network", 2, marks=[pytest.mark.exhaustive, needs_plugin("critic")]),
        ("torchrun", "experts", 2),
        pytest.param("accelerate", "plain", 2, marks=pytest.mark.exhaustive),
        pytest.param("torchrun", "tied", 4, marks=pytest.mark.exhaustive),
        pytest.param("torchrun", "penalties", 2, marks=pytest.mark.exhaustive),
        pytest.param("torchrun", "probe", 2, marks=[pytest.mark.exhaustive, needs_plugin("critic")]),
        pytest.param("torchrun", "head", 2, marks=[pytest.mark.exhaustive, needs_plugin("critic")]),
    ],
)
def test_several_processes_do_the_steps_of_one(launcher: str, kind: str, processes: int, tmp_path: Path) -> None:
    """Loss, gradient norm, metrics, weights and moments over three steps, checkpoints, and a step from one."""
    if kind == "experts":
        save_model_with_experts(tmp_path / "model")
    else:
        save_model(tmp_path / "model", tied=kind == "tied", **(DEEP if kind == "kl" else {}))
    learner = learner_of(ProcessGroup(), tmp_path / "model", kind)
    before = weights_of(learner)
    numbers, wanted = told_by(learner, tmp_path / "one")
    root = str(HERE.parents[2])
    done = subprocess.run(
        launched(launcher, tmp_path, kind, processes),
        env=os.environ
        | {"PYTHONPATH": f"{root}:{HERE.parents[1] / 'kit'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    tensors = load_file(tmp_path / "told.safetensors")

    assert told["size"] == processes
    assert told["share"] == pytest.approx(1 / processes, abs=0.03)
    numbers["steps"] += numbers["steps"][3:] * (len(told["steps"]) - 4)  # several processes read the checkpoint of one
    for step, alone in zip(told["steps"], numbers["steps"], strict=True):
        assert step == pytest.approx(alone, rel=1e-6, abs=1e-6)
    assert told["steps"][2] == told["steps"][3]
    same_tensors(tensors, wanted)
    for name in before:
        assert tensors[f"again.{name}"].equal(tensors[f"weights.{name}"])
    assert max(float((wanted[f"weights.{name}"] - tensor).abs().max()) for name, tensor in before.items()) > 1e-2
    for name in [name for name in tensors if name.startswith("state.")]:
        assert tensors[name.replace("state.", "state-again.", 1)].equal(tensors[name])
    one, several = Path(numbers["checkpoint"]), Path(told["checkpoint"])
    assert len(list((several / "policy").iterdir())) == processes
    read_checkpoint(several, learner)  # one process reads the checkpoint of several
    assert learner.step(rows_for(learner), 2) == pytest.approx(told["steps"][2], rel=1e-6, abs=1e-6)
    parts = ["policy", "optimizer", *(["critic"] if kind in ("probe", "head", "network") else [])]
    same_tensors(state_in(several, parts), state_in(one, parts))
    whole = [path.relative_to(one) for place in ("model", "adapter") for path in (one / place).glob("*.safetensors")]
    assert len(whole) == 1
    same_tensors(load_file(several / whole[0]), load_file(one / whole[0]))


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name != "torch_rng":
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_a_process_of_its_own_is_a_team_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process_group = join_process_group()
    assert type(process_group) is ProcessGroup
    assert (process_group.main, process_group.size) == (True, 1)
    model = nn.Linear(2, 1, bias=False)
    run = process_group.shard(model)
    run(model, torch.tensor([[3.0, 4.0]])).sum().backward()
    assert process_group.clip_grad_norm(list(model.parameters()), 1.0) == 5.0
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [pytest.approx([0.6, 0.8], rel=1e-5)]
    assert process_group.assign(["a", "bc"], len) == [("a", True), ("bc", True)]
    assert process_group.all_gather(3) == [3]
    with process_group.full_parameters(model), torch.no_grad():
        process_group.copy_part(torch.full((1, 2), 2.0), model.weight)
    assert model.weight.tolist() == [[2.0, 2.0]]


def test_a_team_that_does_not_come_together_says_how_to_launch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainError, match="accelerate launch") as raised:
        join_process_group()
    assert raised.value.kind == "train_setup"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 7])
def test_packs_are_dealt_in_equal_numbers_and_count_once(size: int, count: int) -> None:
    packs = [f"{number}" * (number % 3 + 1) for number in range(count)]
    hands = []
    for rank in range(size):
        process = object.__new__(ShardedProcessGroup)  # dealing asks nobody
        process.rank, process.size = rank, size
        hands.append(process.assign(packs, len))
    assert {len(hand) for hand in hands} == {-(-count // size)}
    assert sorted(pack for hand in hands for pack, counts in hand if counts) == sorted(packs)
    for together in zip(*hands, strict=True):
        costs = [len(pack) for pack, _ in together]
        assert max(costs) - min(costs) <= 2
