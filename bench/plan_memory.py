"""The resident memory of processes that train, beside the plan of `engine plan`.

    python bench/plan_memory.py                 # 1, 2 and 4 processes on this machine; a model of 47 million parameters in float32
    python bench/plan_memory.py --against BASE  # the time of the plan of a 32B training, alternating with that of the checkout BASE

Each process makes two steps of two micro-batches. Its resident memory is read from /proc every 5 ms: private memory (`RssAnon`) and mapped files
(`RssFile`: libraries, and the weights' file while it is read). What a process holds before its model is made is subtracted.

glibc keeps freed memory for itself, with growing limits. Here it gives blocks of 64 kB and more back when they are freed; `--glibc-default` leaves it as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TOKENS = 512
SPEC = """
spec: episode/v1
name: planned
model: {path: MODEL}
backend: {kind: local}
tasks: {source: inline, rows: [{id: t}], id: id}
prompt: [{role: user, content: "Say it."}]
machine: {preset: single_turn}
limits: {turn_tokens: 6}
train: {device: cpu, memory: {max_tokens_per_microbatch: TOKENS}}
"""


SHAPE_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 25600, "max_position_embeddings": 40960, "num_attention_heads": 64, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
"""Qwen3-32B. No weights are needed."""


def compare_times(base: Path, pairs: int) -> None:
    """Plan with 8 processes and one micro-batch of 16,384 tokens in bfloat16; each time is a whole process."""
    here = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(here / "tests/kit"))
    from shipped_tokenizers import unpack

    with tempfile.TemporaryDirectory() as folder:
        model = unpack("qwen3", Path(folder))
        (model / "config.json").write_text(json.dumps(SHAPE_32B))
        spec = Path(folder) / "spec.yaml"
        text = (
            SPEC.replace("MODEL", str(model)).replace("TOKENS", "16384").replace("device: cpu", "precision: bfloat16")
        )
        spec.write_text(text)
        for _ in range(pairs):
            for name, checkout in (("this checkout", here), (base.name, base.resolve())):
                plugin = (checkout / "engine/plugins/plan").is_dir()
                words = ["plan", str(spec)] if plugin else ["train", str(spec), "--plan"]
                began, cpu = time.perf_counter(), os.times()
                done = subprocess.run(
                    [sys.executable, "-m", "engine.cli.main", *words, "--processes", "8", "--memory", "80GB"],
                    env=os.environ | {"PYTHONPATH": str(checkout)}, cwd=checkout, capture_output=True, text=True,
                )  # fmt: skip
                after = os.times()
                spent = after.children_user + after.children_system - cpu.children_user - cpu.children_system
                print(f"{name}: {time.perf_counter() - began:.1f} s, {spent:.1f} s CPU\n{done.stdout}{done.stderr}")


class Resident:
    """The private memory and the mapped files of this process, in bytes, and the peak of the first."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def read(self) -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        return int(found["RssAnon"]) * 1024, int(found["RssFile"]) * 1024

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, self.read()[0])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def rows_of(count: int) -> list[Any]:
    """Rows that fill one micro-batch each."""
    import numpy as np

    from engine.store.rows.row import RowEpisode, TrainingRow

    rng = np.random.default_rng(0)
    return [
        TrainingRow.of_tokens(
            rng.integers(0, 300, TOKENS),
            np.arange(TOKENS) > 0,
            logprobs=rng.normal(-6, 0.1, TOKENS),
            advantages=rng.normal(0, 1, TOKENS),
            episode=RowEpisode(task_id=f"t{number}", episode_id=f"e{number}"),
        )
        for number in range(count)
    ]


def work(spec: Path) -> None:
    """One process: two steps. Writes SPEC.<rank>.json."""
    import torch

    from engine.spec.load import load_spec
    from engine.tokens.loading import load_format
    from engine.train.distributed import join_process_group
    from engine.train.setup import learner_of

    torch.set_num_threads(1)
    loaded, resident = load_spec(spec), Resident()
    format = load_format(loaded.spec.model, loaded.base)
    process_group = join_process_group()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (before the first reading)

    private, mapped = resident.read()
    resident.start()
    learner = learner_of(loaded, format, process_group)
    loading = resident.peak
    if process_group.main:
        for number in range(2):
            learner.step(rows_of(2 * process_group.size), number)
        process_group.close()
    else:
        learner.follow()
    resident.stop()
    told = {
        "private_before": private, "mapped_before": mapped, "loading": loading, "peak": resident.peak,
        "mapped": resident.read()[1],
    }  # fmt: skip
    spec.with_suffix(f".{process_group.rank}.json").write_text(json.dumps(told))


def main() -> None:
    """Plan, train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--against", type=Path, metavar="BASE")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument(
        "--glibc-default", action="store_true", help="leave the limits of glibc's allocator as they are"
    )
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    if options.against is not None:
        compare_times(options.against, options.pairs)
        return
    from engine.plugins.local.tiny_lm import build
    from engine.plugins.plan.plan import plan_memory
    from engine.spec.load import load_spec

    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 7, "num_attention_heads": 12}
        model = build(Path(folder) / "model", **shape, num_key_value_heads=4)
        spec = Path(folder) / "spec.yaml"
        spec.write_text(SPEC.replace("MODEL", str(model)).replace("TOKENS", str(TOKENS)))
        print(
            "| processes | planned | peak of private memory, above the start | difference | before the model: private + mapped |"
        )
        print("|---|---|---|---|---|")
        for processes in options.processes:
            planned = plan_memory(load_spec(spec), processes=processes, gpu=False).total
            command = [sys.executable]
            if processes > 1:
                command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if not options.glibc_default:
                environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            subprocess.run([*command, __file__, "--worker", str(spec)], env=environment, check=True)
            found = [json.loads(spec.with_suffix(f".{rank}.json").read_text()) for rank in range(processes)]
            above = [each["peak"] - each["private_before"] for each in found]
            loading = max(each["loading"] - each["private_before"] for each in found)
            start = max(each["private_before"] for each in found), max(each["mapped_before"] for each in found)
            print(
                f"| {processes} | {planned / 1e6:.0f} MB | {loading / 1e6:.0f} MB | {min(above) / 1e6:.0f} to {max(above) / 1e6:.0f} MB | "
                f"{100 * (max(above) / planned - 1):+.0f} % | {start[0] / 1e6:.0f} + {start[1] / 1e6:.0f} MB |"
            )


if __name__ == "__main__":
    main()
