"""slime's own code from a checkout, over the hooks; and images of all turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from slime_kit import (
    WHITELIST,
    sampled,
)

from engine.plugins.trainers.slime import advantages, convert


@pytest.mark.slow
@pytest.mark.trainers
def test_slimes_contract_tests_pass_over_the_hooks(source: Path, write: Any) -> None:
    here = Path(__file__).parents[4]
    folders = [here, *(here / "tests" / name for name in ("plugins/trainers", "core/backends", "kit")), here / "bench"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SLIME_KIT_SPEC": str(write()),
        "SLIME_CONTRACT_CUSTOM_GENERATE_FUNCTION_PATH": "slime_kit.contract_generate",
        "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": "slime_kit.contract_rollout",
        "SLIME_CONTRACT_EVAL_FUNCTION_PATH": "slime_kit.contract_rollout",
        "SLIME_CONTRACT_CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH": "slime_kit.contract_convert",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "slime_kit",
        "-p",
        "no:cacheprovider",
        "tests/plugin_contracts",
    ]
    ran = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "36 passed" in ran.stdout


class Mpu:
    """megatron's parallel state of one process, `rank` of `size` that share each sequence."""

    def __init__(self, rank: int, size: int) -> None:
        self.get_context_parallel_rank = lambda: rank
        self.get_context_parallel_world_size = lambda: size
        self.get_data_parallel_world_size = lambda with_context_parallel: size if with_context_parallel else 1
        self.get_data_parallel_group = lambda with_context_parallel: None


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("size", [1, 2])
def test_slimes_schedule_and_slices_carry_the_advantages(
    source: Path, args: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """`build_dp_schedule`, `tensorize_rollout_data_for_training` and `slice_log_prob_with_cp` of the checkout, with a stand-in of megatron."""
    core = ModuleType("megatron.core")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    backends = ModuleType("slime.backends.megatron_utils")  # its own file imports megatron
    backends.__path__ = [str(source / "slime" / "backends" / "megatron_utils")]
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils", backends)
    monkeypatch.syspath_prepend(str(source))
    core.mpu = Mpu(0, size)  # type: ignore[attr-defined]
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.utils.dp_schedule import build_dp_schedule

    data = convert(args, sampled(args))
    lengths = [len(tokens) for tokens in data["tokens"]]
    schedule = SimpleNamespace(
        micro_batch_size=1, use_dynamic_batch_size=False, balance_by_flops=False, balance_data=False
    )
    parallel = {"dp_size": 1, "cp_size": size, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    (kept,), *_ = build_dp_schedule(
        schedule, parallel, lengths, global_batch_size=args.global_batch_size, rollout_indices=data["rollout_ids"]
    )
    assert sorted(kept) == [0, 1, 2, 3]
    rollout = {name: [data[name][at] for at in kept] for name in WHITELIST if name in data}
    rollout["total_lengths"] = [lengths[at] for at in kept]
    tensorize_rollout_data_for_training(rollout)
    made = []
    whole = sum(float(values.double().abs().sum()) for values in data["rewards"])
    for rank in range(size):
        core.mpu = Mpu(rank, size)  # type: ignore[attr-defined]
        if (loaded := sys.modules.get("slime.backends.megatron_utils.cp_utils")) is not None:
            loaded.mpu = core.mpu  # type: ignore[attr-defined]
        # the sum over processes, which are one here
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, group: value.fill_(whole))
        one = dict(rollout)
        advantages(args, one)
        made.append(one["advantages"])
    for at, row in enumerate(kept):
        parts = [each[at] for each in made]
        expected = data["rewards"][row]
        if size == 1:
            assert torch.equal(parts[0], expected)
            continue
        total, response = lengths[row], data["response_lengths"][row]
        chunk = -(-total // 4)  # two parts for each of two processes: first and last, and the two between
        place = torch.arange(total - response - 1, total - 1) // chunk
        for rank in range(2):
            own = torch.cat([expected[place == rank], expected[place == 3 - rank]])
            assert torch.equal(parts[rank], own)
        assert sum(len(part) for part in parts) == response
