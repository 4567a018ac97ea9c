"""Seconds and pause of a push of weights to SGLang servers, by each method that sends all weights.

    python bench/pushes.py --make FOLDER              a model of 160 million random weights (0.63 GB in float32) and a tokenizer
    scripts/sglang_cpu.sh start FOLDER --port 31100   or a server on a GPU
    python bench/pushes.py FOLDER http://127.0.0.1:31100 [URL …] [--device cuda] [--pushes 5]

The servers keep the weights of the last push. A push is timed from its call to the reply of every server's first request with the
new version. The first push of a method also makes what the later ones keep (the process group of `collective`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def make(folder: Path) -> None:
    """A Qwen2 of the size of a small language model, with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kit")]
    from conftest import build_tokenizer

    build_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def spec_of(model: Path, urls: list[str], method: str, device: str) -> Any:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.sections import read_stored

    return read_stored(
        {
            "spec": "episode/v1",
            "name": "pushes",
            "model": {"path": str(model)},
            "backend": {"kind": "sglang", "urls": urls},
            "tasks": {"source": "inline", "rows": [{"id": "t0"}]},
            "train": {"device": device, "weight_sync": {"method": method}},
        },
        EpisodeSpec,
    )


async def measure(model: Path, urls: list[str], method: str, device: str, pushes: int) -> list[tuple[float, Any]]:
    """(seconds, what it cost) of each push."""
    from engine.plugins.sglang.client import SGLangBackend
    from engine.schemas.generation import SamplingParams
    from engine.tokens.loading import load_format
    from engine.train.policy import Policy
    from engine.train.sync import open_sync

    spec = spec_of(model, urls, method, device)
    format = load_format(spec.model, model)
    backend = SGLangBackend(spec.backend, format, sampling=SamplingParams(), model=str(model))
    policy = Policy.load(model, spec.train, temperature=1.0, vocab=None, vision=None)
    costs = []
    try:
        await backend.start()
        with tempfile.TemporaryDirectory() as folder:
            sync = open_sync(spec, backend, Path(folder), lora=False)
            for version in range(1, pushes + 1):
                began = time.perf_counter()
                pushed = await sync.push(policy, version)
                costs.append((time.perf_counter() - began, pushed))
    finally:
        await backend.close()
    return costs


def main() -> None:
    """Print a table."""
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pushes", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["disk", "tensors", "collective"])
    arguments = parser.parse_args()
    if arguments.make is not None:
        make(arguments.make)
        return
    print("| method | MB | first push, s | later pushes, s | pause of a later push, s |\n|---|---|---|---|---|")
    for method in arguments.methods:
        (first, _), *later = asyncio.run(
            measure(arguments.model, arguments.urls, method, arguments.device, arguments.pushes)
        )
        seconds = statistics.median(cost for cost, _ in later)
        pause = statistics.median(pushed.pause_seconds for _, pushed in later)
        size = later[0][1].bytes / 1e6
        print(f"| `{method}` | {size:.1f} | {first:.2f} | {seconds:.2f} | {pause:.2f} |", flush=True)


if __name__ == "__main__":
    main()
