"""The sections of scripts/gpu_check.sh, each in a process of its own, and the page that they make.

A section is a function that prints lines of Markdown. One that fails says so on the page with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3
"""Exit status without a GPU."""
MODEL = ("torch", "transformers", "numpy", "pydantic", "safetensors")
"""Modules without which no section runs."""
STEP = ("msgspec", "orjson", "structlog", "yaml")
EPISODES = (*STEP, "accelerate", "httpx", "jinja2", "matplotlib", "rich", "renderers", "transitions", "typer")
PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 operations per second, from NVIDIA's data sheets."""


class Section(NamedTuple):
    """A section of the page."""

    title: str
    run: Callable[[bool], None]
    """Called with whether it is a rehearsal; prints Markdown."""
    packages: tuple[str, ...] = ()
    """Modules beside MODEL."""
    seconds: int = 600


def device_of(rehearse: bool) -> str:
    return "cpu" if rehearse else "cuda"


def model_folder(folder: Path, dtype: str, **changes: Any) -> Path:
    """A Qwen2 of random weights, made on the GPU if there is one, and saved in `dtype`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(getattr(torch, dtype))
        model = Qwen2ForCausalLM(Qwen2Config(**sizes | changes, dtype=dtype))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def open_policy(folder: Path, **train: Any) -> Any:
    from engine.schemas.train import TrainSpec
    from engine.train.policy import Policy

    spec = TrainSpec.model_validate({"steps": 1, "loss": {"kind": "grpo"}} | train)
    return Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None), spec


def rows_of(count: int, prompt: int, reply: int, vocabulary: int) -> list[Any]:
    """Rows of one task: the prompt is the same, and all tokens of the replies are trained."""
    import numpy as np

    from engine.store.rows.row import RowEpisode, TrainingRow

    draw = np.random.default_rng(0)
    shared = draw.integers(3, vocabulary, prompt)
    rows = []
    for number in range(count):
        ids = np.concatenate([shared, draw.integers(3, vocabulary, reply)]).astype(np.int32)
        rows.append(
            TrainingRow.of_tokens(
                ids,
                np.arange(len(ids)) >= prompt,
                advantages=np.full(len(ids), 1.0 if number % 2 else -1.0),
                episode=RowEpisode(task_id="a", episode_id=f"a-{number}"),
            )
        )
    return rows


def attention(rehearse: bool) -> None:
    """The packed pass with shared prefixes against one pass for each row, and against the CPU, in float32."""
    import torch

    from engine.train.packing import pack_rows

    torch.backends.cuda.matmul.allow_tf32 = False
    count, prompt, reply = (4, 64, 32) if rehearse else (8, 2048, 512)
    rows = rows_of(count, prompt, reply, 4096)
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder), "float32")
        found: dict[str, Any] = {}
        for name, device, share in (
            ("packed", device_of(rehearse), True),
            ("single", device_of(rehearse), False),
            ("cpu", "cpu", True),
        ):
            policy, _ = open_policy(path, device=device)
            size = count * (prompt + reply) if share else prompt + reply
            packs = pack_rows(rows, size, share_prefixes=share)
            with torch.no_grad():
                for _ in range(2):  # the second time counts
                    began = time.perf_counter()
                    parts = {pack.rows: policy.forward(pack, entropy=False)[0] for pack in packs}
                    if device == "cuda":
                        torch.cuda.synchronize()
                    seconds = time.perf_counter() - began
            values = torch.cat([parts[key].float().cpu() for key in sorted(parts)])
            found[name] = (values, seconds, sum(pack.tokens for pack in packs))
    packed, single, cpu = (found[name][0] for name in ("packed", "single", "cpu"))
    print(f"{count} rows of {prompt + reply:,} tokens that share {prompt:,}; 4 layers, float32, TF32 off.\n")
    print("| | |\n|---|---|")
    print(
        f"| largest difference of a log-prob, packed against one row at a time | {float((packed - single).abs().max()):.1e} |"
    )
    print(f"| the same, against the CPU | {float((packed - cpu).abs().max()):.1e} |")
    print(f"| forward pass, packed ({found['packed'][2]:,} tokens) | {1e3 * found['packed'][1]:.1f} ms |")
    print(f"| forward passes, one row at a time ({found['single'][2]:,} tokens) | {1e3 * found['single'][1]:.1f} ms |")


def bfloat16(rehearse: bool) -> None:
    """Log-probs and gradient norm in bfloat16 and in mixed precision against float32, same weights."""
    import torch

    from engine.train.packing import pack_rows

    rows = rows_of(4, 64, 64 if rehearse else 960, 4096)
    results: dict[str, tuple[Any, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder), "float32", num_hidden_layers=4 if rehearse else 12)
        for precision in ("float32", "mixed", "bfloat16"):
            policy, _ = open_policy(path, device=device_of(rehearse), precision=precision)
            (pack,) = pack_rows(rows, 100_000, share_prefixes=True)
            logprobs, _ = policy.forward(pack, entropy=False)
            logprobs.float().mean().backward()
            norm = torch.nn.utils.get_total_norm(
                [each.grad.float() for _, each in policy.named_parameters() if each.grad is not None]
            )
            results[precision] = (logprobs.detach().float().cpu(), float(norm))
    print(
        "| | mean difference of a log-prob to float32 | largest | gradient norm / that of float32 |\n|---|---|---|---|"
    )
    reference, norm = results["float32"]
    for precision in ("mixed", "bfloat16"):
        apart = (results[precision][0] - reference).abs()
        print(
            f"| `{precision}` | {float(apart.mean()):.1e} | {float(apart.max()):.1e} | {results[precision][1] / norm:.3f} |"
        )


def step_7b(rehearse: bool) -> None:
    """A step of a model with Qwen2.5-7B's shapes: as many of its 28 layers as the plan says fit into 80 % of the GPU's memory."""
    import torch

    from engine.train.learner import Learner

    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
             "vocab_size": 152064}  # fmt: skip
    layers, tokens, count = 28, 8192, 8
    train: dict[str, Any] = {
        "device": device_of(rehearse),
        "precision": "bfloat16",
        "proximal_logprobs": "recompute",
        "rollout_correction": {"kind": "none"},
        "memory": {"gradient_checkpointing": True, "max_tokens_per_microbatch": tokens},
    }
    if rehearse:
        shape, layers, tokens, count = {}, 4, 256, 2
        train["memory"]["max_tokens_per_microbatch"] = tokens
    memory = 64 << 30 if rehearse else torch.cuda.get_device_properties(0).total_memory
    plan = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        while layers > 1:
            plan = planned(path / "plan", train, tokens, num_hidden_layers=layers, **shape)
            if plan.total < 0.8 * memory:
                break
            layers -= 4
        assert plan is not None
        model_folder(path / "model", "bfloat16", num_hidden_layers=layers, **shape)
        policy, spec = open_policy(path / "model", **train)
    learner = Learner(policy, spec)
    vocabulary = int(shape.get("vocab_size", 4096))
    rows = rows_of(count, 1, tokens - 1, vocabulary)
    learner.step(rows, 0)  # makes AdamW's moments
    if not rehearse:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    told = learner.step(rows, 1)
    if not rehearse:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    parameters = sum(each.numel() for _, each in policy.named_parameters())
    embedded = policy.model.get_input_embeddings().weight.numel()
    heads = policy.model.config.num_attention_heads
    width = policy.model.config.hidden_size // heads
    operations = 6 * (parameters - embedded) + 6 * layers * heads * width * tokens
    total = count * tokens
    print(f"{parameters / 1e9:.2f} billion parameters ({layers} of 28 layers), bfloat16, gradient checkpointing, ")
    print(f"{count} rows of {tokens:,} tokens, one row per micro-batch, one AdamW update.\n")
    print("| | |\n|---|---|")
    if not rehearse:
        peak = torch.cuda.max_memory_allocated()
        print(
            f"| peak memory | {peak / 1e9:.1f} GB; planned {plan.total / 1e9:.1f} GB ({100 * (plan.total / peak - 1):+.0f} %) |"
        )
    print(f"| seconds of a step | {seconds:.2f} |")
    print(f"| tokens per second | {total / seconds:,.0f} |")
    name = "" if rehearse else torch.cuda.get_device_name()
    known = next((value for key, value in PEAKS.items() if key in name), None)
    speed = operations * total / seconds
    used = (
        "data-sheet peak of this GPU not known here"
        if known is None
        else f"{100 * speed / known:.1f} % of {known / 1e12:.0f} TFLOP/s"
    )
    print(f"| MFU | {speed / 1e12:.1f} TFLOP/s: {used} |")
    print(f"| loss, gradient norm | {told['loss']:.4f}, {told['grad_norm']:.4f} |")
    print(
        "\nMFU counts 6 operations per parameter (without the input embedding) and token, and causal attention; recomputation is not counted."
    )


def planned(folder: Path, train: dict[str, Any], tokens: int, **shape: Any) -> Any:
    """The plan of a training of that shape. Only config.json and a tokenizer are written."""
    import yaml
    from transformers import AutoConfig

    from engine.plugins.local.tiny_lm import build
    from engine.plugins.plan.plan import plan_memory
    from engine.spec.load import load_spec

    build(folder / "model")
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()  # a plan needs none
    config = AutoConfig.from_pretrained(folder / "model")
    config.layer_types = None
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
             "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 32768}  # fmt: skip
    fresh = type(config)(
        **sizes | shape, bos_token_id=None, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    fresh.architectures = ["Qwen2ForCausalLM"]
    fresh.save_pretrained(folder / "model")
    spec = {
        "spec": "episode/v1",
        "name": "planned",
        "model": {"path": str(folder / "model")},
        "backend": {"kind": "local"},
        "tasks": {"source": "inline", "rows": [{"id": "t"}], "id": "id"},
        "prompt": [{"role": "user", "content": "Say it."}],
        "machine": {"preset": "single_turn"},
        "limits": {"turn_tokens": 6},
        "train": {"steps": 1, "loss": {"kind": "grpo"}} | train,
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return plan_memory(load_spec(path), processes=1, gpu=train["device"] != "cpu")


def color_square(rehearse: bool) -> None:
    """specs/train_color_square.yaml from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        teach = ["--teach", "150", "--right", "0.4"] if not rehearse else []
        call("scripts/make_tiny_vlm.py", str(model), *teach)
        settings = ["train.steps=1", "train.eval=null", "train.tasks_per_step=2"] if rehearse else []
        began = time.perf_counter()
        lines = train(
            "specs/train_color_square.yaml", Path(folder), f"model.path={model}", "backend.dtype=float32", *settings
        )
        minutes = (time.perf_counter() - began) / 60
    print(f"{len(lines)} steps in {minutes:.1f} minutes.\n")
    print("| | first | last |\n|---|---|---|")
    for name in ("reward/mean", "eval/reward", "eval/reward/mean", "sampler/diff_max", "tokens_per_second"):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            print(f"| `{name}` | {values[0]:.3g} | {values[-1]:.3g} |")


def pushes(rehearse: bool) -> None:
    """Pushes of weights to a server that the training starts, by each method that the engine has.

    The server is on the GPU of the training. For `collective` it is on a second one, because NCCL takes a GPU once only.
    """
    import torch

    from engine.plugins.sglang.spec import SGLangBackendSpec

    if rehearse:
        print("Needs a GPU.")
        return
    print("`tensors` is CUDA IPC here: the only process of the training and the server are on one GPU.\n")
    print("| method | MB | seconds of a push | pause in seconds |\n|---|---|---|---|")
    left_out = []
    for method in SGLangBackendSpec.weight_methods:
        if method in ("auto", "adapter"):
            continue
        alone = method == "collective"
        if alone and torch.cuda.device_count() < 2:
            left_out.append(f"`{method}`: not run: NCCL needs a second GPU for the server.")
            continue
        with tempfile.TemporaryDirectory() as folder:
            call("scripts/make_tiny_vlm.py", str(Path(folder) / "model"))
            gpus = "[1]" if alone else "1"
            server = f'{{kind: sglang, launch: {{gpus: {gpus}, args: [--mem-fraction-static, "0.4"]}}}}'
            settings = [f"model.path={folder}/model", f"backend={server}", f"train.weight_sync.method={method}"]
            settings += ["train.steps=3", "train.eval=null", "train.tasks_per_step=2"]
            last = train("specs/train_color_square.yaml", Path(folder), *settings)[-1]
        print(
            f"| `{method}` | {last['sync/bytes'] / 1e6:.1f} | {last['time/sync']:.2f} | {last['sync/pause_seconds']:.2f} |"
        )
    for line in left_out:
        print(f"\n{line}")


def call(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit status {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"
        )
    return done.stdout


def train(spec: str, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """A training in a process of its own; the lines of its metrics."""
    changes = [part for setting in settings for part in ("--set", setting)]
    call("-m", "engine.cli.main", "train", spec, "--quiet", "--out", str(folder), "--run-name", "run", *changes)
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]


SECTIONS = {
    "attention": Section("Attention", attention),
    "bfloat16": Section("bfloat16 against float32", bfloat16),
    "step": Section("A step of a 7B-shaped model", step_7b, STEP, seconds=900),
    "color_square": Section("ColorSquare, end to end", color_square, EPISODES, seconds=1800),
    "sglang": Section("Pushes of weights to SGLang", pushes, ("sglang", *EPISODES), seconds=1800),
}


def missing(section: Section) -> list[str]:
    return [name for name in (*MODEL, *section.packages) if importlib.util.find_spec(name) is None]


def examine(name: str, section: Section, rehearse: bool) -> Iterator[str]:
    """The section's lines: its result, its error, or why it did not run."""
    yield f"\n## {section.title}\n"
    absent = missing(section)
    if absent:
        yield f"not run: {', '.join(absent)}"
        return
    command = [sys.executable, __file__, "--section", name, *(["--rehearse"] if rehearse else [])]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=section.seconds, check=False)
    except subprocess.TimeoutExpired:
        yield f"failed: longer than {section.seconds} s"
        return
    if done.returncode:
        yield f"failed, exit status {done.returncode}:\n\n```\n{done.stderr.strip()[-1500:]}\n```"
        return
    yield done.stdout.strip()


def machine() -> list[str]:
    """What the figures were measured with."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    versions = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    with contextlib.suppress(ImportError):
        import transformers

        versions.append(f"transformers {transformers.__version__}")
    with contextlib.suppress(ImportError):
        import sglang

        versions.append(f"SGLang {sglang.__version__}")
    date = time.strftime("%Y-%m-%d")
    return [f"One {torch.cuda.get_device_name()} with {memory / 1e9:.0f} GB; {', '.join(versions)}; {date}."]


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks on one GPU; see scripts/gpu_check.sh.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu.md", help="the page (default: build/gpu.md)")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section; may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; writes nothing")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        if options.rehearse:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        SECTIONS[options.section].run(options.rehearse)
        return 0
    if not options.rehearse and not has_gpu():
        reason = "torch sees no GPU" if importlib.util.find_spec("torch") else "torch is not installed"
        print(f"No GPU: {reason}. Nothing was run, nothing was written, and nothing is claimed.")
        return NO_GPU
    lines = ["# Figures of a GPU", "", "Written by `scripts/gpu_check.sh`.", ""]
    lines += ["A rehearsal on the CPU."] if options.rehearse else machine()
    failed = False
    for name in options.only or SECTIONS:
        for text in examine(name, SECTIONS[name], options.rehearse):
            failed = failed or text.startswith("failed")
            lines.append(text)
            print(text, flush=True)
    if not options.rehearse:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"\nWrote {options.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
