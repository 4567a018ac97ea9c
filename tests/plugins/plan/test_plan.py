"""`engine plan`: the memory of a training, planned and measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
from process_group_worker import save_model
from written_specs import save_spec

from engine.plugins.plan import plan as plan_module
from engine.plugins.plan import planned_step
from engine.plugins.plan.plan import plan_memory, row_findings
from engine.schemas.sections import dump
from engine.spec.load import LoadedSpec, load_spec
from engine.train.setup import check_changes

sys.path.append(str(Path(__file__).parent))
from plan_worker import IMAGES

HERE = Path(__file__).parent
SEEN: dict[str, Any] = {"images": IMAGES.number, "image_size": (IMAGES.width, IMAGES.height)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"kl": {"coefficient": 0.1}, "memory": {"max_tokens_per_microbatch": 300, "gradient_checkpointing": True}},
    "lora": {"lora": {"rank": 8}, "kl": {"coefficient": 0.1}},
    "bfloat16": {"precision": "bfloat16", "kl": {"coefficient": 0.1}},
    "probe": {"critic": {"kind": "probe"}},
    "head": {"critic": {"kind": "head"}, "lora": {"rank": 8}},
    "network": {
        "critic": {"kind": "network"},
        "memory": {"max_tokens_per_microbatch": 300, "gradient_checkpointing": True},
    },
    "experts": {"kl": {"coefficient": 0.1}},
    "images": {"kl": {"coefficient": 0.1}},
    "images again": {"memory": {"max_tokens_per_microbatch": 300, "gradient_checkpointing": True}},
    "images of a critic": {"critic": {"kind": "network"}},
}


@pytest.fixture
def spec(tmp_path: Path, tiny_model_dir: Path) -> Any:
    """Write a spec whose model is large beside Python's own tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 128, 384, 6
    config.layer_types = None if getattr(config, "layer_types", None) is None else ["full_attention"] * 6
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    @cache
    def vlm() -> Path:
        from engine.plugins.local.tiny_vlm import build

        return build(tmp_path / "vlm", intermediate_size=384, num_hidden_layers=6)

    @cache
    def moe() -> Path:
        return tiny_moe.build(
            tmp_path / "moe", vocab_size=1000, hidden_size=128, moe_intermediate_size=96, num_hidden_layers=6
        )

    def make(seeing: bool = False, experts: bool = False, name: str = "spec", **train: Any) -> Path:
        credit = {"method": "gae"} if "critic" in train else {"method": "turn_return"}
        return save_spec(
            tmp_path / f"{name}.yaml",
            {
                "spec": "episode/v1",
                "name": "planned",
                "model": {"path": str(vlm() if seeing else moe() if experts else tmp_path / "model")},
                "backend": {"kind": "local"},
                "tasks": {"source": "inline", "rows": [{"id": "t"}], "id": "id"},
                "prompt": [{"role": "user", "content": "Say it."}],
                "machine": {"preset": "single_turn"},
                "limits": {"turn_tokens": 6},
                "rewards": {"credit": credit},
                "train": {"device": "cpu", "memory": {"max_tokens_per_microbatch": 300}} | train,
            },
        )

    return make


def measured(paths: Sequence[Path], processes: int) -> Iterator[tuple[Path, list[dict[str, int]]]]:
    """What a step of each spec takes in each process. One process measures several specs; several processes join once, for one."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(HERE / "plan_worker.py"), *map(str, paths)]
    environment = os.environ | {
        "PYTHONPATH": f"{HERE.parents[2]}:{HERE.parents[1] / 'kit'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in paths:
        yield path, [json.loads(path.with_suffix(f".{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "processes"),
    [
        (["kl", "bfloat16", "network", "images", "experts"], 1),
        pytest.param(["lora"], 2, marks=pytest.mark.exhaustive),
        pytest.param(["plain", "probe"], 1, marks=pytest.mark.exhaustive),
        *(
            pytest.param([kind], processes, marks=pytest.mark.exhaustive)
            for kind, processes in [
                *[
                    ("plain", 2),
                    ("plain", 4),
                    ("kl", 2),
                    ("bfloat16", 2),
                    ("probe", 2),
                    ("head", 2),
                    ("network", 2),
                    ("network", 4),
                ],
                *[("images", 2), ("images", 4), ("images again", 2), ("images of a critic", 2), ("experts", 2)],
            ]
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else None,
)
def test_the_plan_is_what_a_step_takes(spec: Any, kinds: list[str], processes: int) -> None:
    paths = [spec(kind.startswith("images"), kind == "experts", kind, **KINDS[kind]) for kind in kinds]
    for kind, (path, found) in zip(kinds, measured(paths, processes), strict=True):
        seen = SEEN if kind.startswith("images") else {}
        plan = plan_memory(load_spec(path), processes=processes, gpu=False, **seen)
        print(kind, processes, plan.total, plan.bytes, found)
        for each in found:
            assert plan.total == pytest.approx(each["peak"], rel=0.1), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "gpu"),
    [
        ("kl", 1, False),
        ("kl", 4, True),
        ("lora", 2, True),
        ("experts", 2, True),
        ("images", 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("bfloat16", 2, True), ("probe", 1, True), ("network", 2, False), ("images again", 2, True))
        ),
    ],
)
def test_two_short_models_and_few_blocks_of_logits_give_the_plan_of_all_layers_and_ids(
    spec: Any, monkeypatch: pytest.MonkeyPatch, kind: str, processes: int, gpu: bool
) -> None:
    path = spec(kind.startswith("images"), kind == "experts", kind, **KINDS[kind])
    loaded = load_spec(path, ["train.memory.logits_chunk_elements=65536"])
    simulated = []

    def counted(*arguments: Any, **named: Any) -> Any:
        steps, copies = simulate_copies(*arguments, **named)
        simulated.append(copies)
        return steps, copies

    simulate_copies = planned_step.simulate_copies
    monkeypatch.setattr(planned_step, "simulate_copies", counted)
    short = plan_memory(loaded, processes=processes, gpu=gpu)
    assert simulated == [6, 6]
    monkeypatch.setattr(planned_step, "LEAST_COPIES", {False: 7, True: 7})
    monkeypatch.setattr(planned_step, "representative_vocab", lambda _count, vocab, _elements: vocab)
    assert plan_memory(loaded, processes=processes, gpu=gpu) == short


def test_a_pattern_of_layers_is_found_between_others() -> None:
    assert planned_step.longest_repeat(list("aaaa")) == (0, 1, 4)
    assert planned_step.longest_repeat(list("dmmmmm")) == (1, 1, 5)
    assert planned_step.longest_repeat(list("sssfsssfsssfss")) == (0, 4, 3)
    assert planned_step.longest_repeat(list("abc")) == (0, 3, 1)
    assert planned_step.longest_repeat([]) == (0, 1, 0)


@pytest.mark.slow
def test_no_process_of_several_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """Neither while it and its reference are loaded, nor in the check of its forward pass. One layer and the embeddings are a
    small part of the model, and activations of a short row are small beside it."""
    save_model(tmp_path / "model", tied=False, layers=12, width=4)
    root, processes = HERE.parents[2], 4
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    done = subprocess.run(
        [*command, str(HERE / "loading_worker.py"), str(tmp_path)],
        env=os.environ
        | {
            "PYTHONPATH": f"{root}:{root / 'tests/core/train'}:{root / 'tests/kit'}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "held.json").read_text())
    assert len(told["held"]) == processes
    for now, peak in told["held"]:
        assert now < (2 / processes + 0.2) * told["whole"]
        assert peak < (2 / processes + 0.5) * told["whole"]


@pytest.mark.slow
def test_the_plan_counts_by_kind_without_loading(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is read, and kinds that do not depend on activations are exact."""
    path = spec(**KINDS["kl"])
    for file in (path.parent / "model").glob("*.safetensors"):
        values = file.read_bytes()
        file.write_bytes(values[: len(values) // 2] + bytes(len(values) - len(values) // 2))  # the headers stay
    found = {n: plan_memory(load_spec(path), processes=n, gpu=False) for n in (1, 2)}
    weights = found[1].bytes["weights"]
    assert found[1].bytes["gradients"] == found[1].bytes["reference"] == weights
    assert found[1].bytes["moments"] == pytest.approx(2 * weights, rel=1e-3)
    for name in ("weights", "gradients", "moments", "reference"):
        assert found[2].bytes[name] == pytest.approx(found[1].bytes[name] / 2, rel=0.02)
    assert found[2].longest_row(10**9) > found[1].longest_row(10**9) > found[1].longest_row(10**8) > 0
    assert found[1].longest_row(10**6) == 0


@pytest.mark.slow
def test_the_command_says_what_fits_and_what_makes_it_smaller(spec: Any) -> None:
    from typer.testing import CliRunner

    from engine.cli.main import app

    path = spec()
    told = CliRunner().invoke(app, ["plan", str(path), "--memory", "1GB"])
    assert told.exit_code == 0, told.output
    assert "Memory of the process at the peak of a step, with a micro-batch of one row of 300 tokens" in told.output
    assert "5.24 MB  weights" in told.output
    assert "10.49 MB  AdamW's moments" in told.output
    assert "Precision: float32, on a CPU" in told.output
    on_gpu = ["plan", str(path), "--memory", "1GB", "--set", "train.device=auto"]
    told = CliRunner().invoke(app, on_gpu)
    assert "Precision: mixed, on a GPU" in told.output
    assert "TF32" not in told.output
    told = CliRunner().invoke(app, [*on_gpu, "--set", "train.precision=float32"])
    assert "Precision: float32" in told.output
    assert "without its tensor cores (TF32 is off)" in " ".join(told.output.split())
    command = ["plan", str(path), "--processes", "2", "--memory", "35.5MB", "--set"]
    told = CliRunner().invoke(app, [*command, "limits.episode_tokens=280"])
    assert told.exit_code == 1
    assert "Memory of each of 2 processes" in told.output
    assert "What makes it smaller: `train.memory.max_tokens_per_microbatch: " in told.output.replace("\n", " ")
    told = CliRunner().invoke(app, [*command, "limits.episode_tokens=1000"])
    assert told.exit_code == 1
    assert "verl (`ulysses_sequence_parallel_size`)" in told.output.replace("\n", " ")
    for wrong in (["--memory", "much"], ["--image-size", "wide"]):
        assert CliRunner().invoke(app, ["plan", str(path), *wrong]).exit_code == 2
    assert CliRunner().invoke(app, ["plan"]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan"], "there is no option `engine train --plan`: write `engine plan SPEC`"),
        (["--memory", "1GB"], "there is no option `engine train --memory`: write `engine plan SPEC --memory SIZE`"),
    ],
)
def test_the_old_options_are_refused_with_the_new_command(options: list[str], words: str) -> None:
    from typer.testing import CliRunner

    from engine.cli.main import app

    told = CliRunner().invoke(app, ["train", "spec.yaml", *options])
    assert told.exit_code == 2
    assert words in told.output


@pytest.mark.slow
def test_the_longest_row_is_compared_with_the_memory_of_the_spec(
    train_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine validate` reports a row that does not fit, with what to change, and plans nothing for a model that is not here."""
    plans: dict[str, Any] = {}

    def planned_once(loaded: LoadedSpec, **settings: Any) -> Any:
        """The plan depends on everything but the memory that it is compared with, and takes a second."""
        fields = dump(loaded.spec)
        del fields["train"]["plan"]["gpu_memory"]
        key = json.dumps([fields, settings])
        if key not in plans:
            plans[key] = plan_memory(loaded, **settings)
        return plans[key]

    limits = {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64}

    def found(memory: str, seconds: float = 200.0, **changes: Any) -> list[Any]:
        train = {"plan": {"gpu_memory": memory, "processes": 2}, "memory": {"max_tokens_per_microbatch": 64}}
        return list(row_findings(load_spec(train_spec(train=train, **({"limits": limits} | changes))), seconds))

    with monkeypatch.context() as patched:
        patched.setattr(plan_module, "plan_memory", planned_once)
        assert found("1GB") == []
        (row,) = found("2MB")
    assert len(plans) == 1
    assert (row.rule, row.severity, row.path) == ("train.plan", "warning", ("limits", "episode_tokens"))
    assert re.match(
        r"`limits.episode_tokens` is 64, and the longest row whose step fits into 2.00 MB of each of 2 GPUs has \d+ tokens$",
        row.message,
    )
    assert "engine validate --trainer verl" in row.fix
    assert found("1kB", model={"path": "no/such-model"}) == []
    (late,) = found("1GB", seconds=1e-6)
    assert late.message == "the memory of a step was not planned within 1e-06 s"


@pytest.mark.slow
def test_validate_plans_in_its_sandbox(spec: Any) -> None:
    """Without network and programs, and in the memory of the checking process."""
    from typer.testing import CliRunner

    from engine.cli.main import app

    path = spec(plan={"gpu_memory": "35.5MB", "processes": 2})
    told = CliRunner().invoke(app, ["validate", str(path)])
    words = " ".join(told.output.split())
    assert told.exit_code == 0, told.output
    assert "warning[train.plan] rows may be as long as the model's context" in words, told.output
    assert "verl (`ulysses_sequence_parallel_size`)" in words
    told = CliRunner().invoke(app, ["validate", str(path), "--set", "limits.episode_tokens=280"])
    assert "a micro-batch has up to 300 tokens (`train.memory.max_tokens_per_microbatch`), and 2" in " ".join(
        told.output.split()
    ), told.output
    told = CliRunner().invoke(app, ["plan", str(path)])
    assert told.exit_code == 1, told.output
    assert "Memory of each of 2 processes" in told.output
    seeing = spec(True, plan={"gpu_memory": "1GB", "images": 2, "image_size": "168x112"})
    told = CliRunner().invoke(app, ["plan", str(seeing)])
    assert told.exit_code == 0, told.output
    assert "a micro-batch of one row of 300 tokens with 2 images of 168 x 112 pixels:" in " ".join(told.output.split())
    assert "images: pixels, activations of the vision model" in told.output
    path = spec(plan={"gpu_memory": "35.5MB", "processes": 2})  # in the same file: the model that reads no images
    told = CliRunner().invoke(app, ["plan", str(path), "--images", "2"])
    assert told.exit_code == 1, told.output
    assert "gets no images, so none can be planned" in told.output


def test_a_resumed_training_may_be_planned_for_another_machine(spec: Any) -> None:
    path = spec(plan={"gpu_memory": "1GB", "processes": 2})
    before, after = load_spec(path).spec, load_spec(path, ["train.plan.processes=4"]).spec
    assert check_changes(before, after) == ["train.plan.processes"]
