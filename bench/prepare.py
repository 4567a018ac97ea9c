"""Seconds to prepare many long rows: `python bench/prepare.py [ROWS] [TOKENIZER_FOLDER]`.

Lengths of prompts of about 6,000 tokens (`tasks.overlong`) and the facts of SFT rows of 12,000 tokens, in one process, in several,
and from the results on disk. CPU seconds are those of this process and its workers.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.plugins.preparing.overlong import PromptLengths
from engine.plugins.sft.row_facts import facts_of, open_rows
from engine.processes.worker import default_processes
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.tokens.loading import load_format

WORDS = "the quick brown fox jumps over a lazy dog while counting 17 apples and naïve 数字"


def seconds(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds, and the result."""
    before, began = os.times(), time.perf_counter()
    result = call()
    wall, after = time.perf_counter() - began, os.times()
    return wall, sum(after[:4]) - sum(before[:4]), result


def measure(name: str, call: Callable[[int], Any], cache: Path) -> None:
    """Print a line of the table for each number of processes, and one for the results on disk."""
    results = []
    for processes in (1, default_processes()):
        os.environ["EPISODE_ENGINE_CACHE"] = str(cache / f"{name}-{processes}")
        for kept in ("made", "from disk"):
            wall, cpu, result = seconds(lambda count=processes: call(count))
            results.append(result)
            print(f"| {name} | {processes} | {kept} | {wall:.2f} | {cpu:.2f} |", flush=True)
    assert all(result == results[0] for result in results)


def main() -> None:
    """Measure and print a table."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    model = sys.argv[2] if len(sys.argv) > 2 else "tiny-qwen2"
    draw = random.Random(0)
    print("| rows | processes | results | wall s | CPU s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [{"q": " ".join(draw.choices(WORDS.split(), k=6000))} for _ in range(rows)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        spec = {
            "spec": "episode/v1",
            "name": "long",
            "model": {"path": model},
            "backend": {"kind": "scripted", "replies": []},
            "tasks": {"source": "jsonl", "path": "rows.jsonl", "overlong": "drop"},
            "limits": {"episode_tokens": 4096, "turn_tokens": 512},
            "prompt": [{"role": "user", "content": "{{q}}"}],
            "machine": "single_turn",
        }
        (folder / "spec.yaml").write_text(json.dumps(spec))
        loaded = load_spec(folder / "spec.yaml")
        form, tasks = load_format(loaded.spec.model, loaded.base), load_tasks(loaded)
        measure("prompts", lambda count: PromptLengths(loaded, form, count).of(tasks, 3584).tolist(), folder)
        path = folder / "sft.jsonl"
        with path.open("w") as stream:
            for number in range(rows):
                stream.write(json.dumps(_row(number, draw)) + "\n")
        measure("SFT rows", lambda count: list(facts_of(path, open_rows(path), count)), folder)


def _row(number: int, draw: random.Random, tokens: int = 12_000) -> dict[str, Any]:
    mask = [0, *([1] * (tokens - 1))]
    numbers = [draw.gauss(0, 1) for _ in range(tokens)]
    return {
        "run_id": "run",
        "task_id": "task",
        "episode_id": f"e{number}",
        "branch": 0,
        "trainable": True,
        "input_ids": [draw.randrange(150_000) for _ in range(tokens)],
        "loss_mask": mask,
        "turn_ids": mask,
        "weight_versions": mask,
        "logprobs": numbers,
        "advantages": mask,
        "token_rewards": mask,
        "outcome": {"reward": 1.0, "rewards": []},
    }


if __name__ == "__main__":
    main()
