"""Seconds of the queries behind `engine show` and `engine view`, over 10,000 stored episodes of 8 turns.

    python bench/view.py --model ../tokenizers/qwen3 [--episodes 10000] [--folder /tmp/engine-view-bench]

The store is made once, by a run with the scripted backend, and kept in the folder. The figures of `cold` are with an empty index, as at
the first look at a run; those of `warm` with the index that the first look made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 8
REPLIES = [
    text
    for turn in range(4)
    for text in (
        f"Let me work it out, attempt {turn}. I write the problem as an expression first, and then I use the calculator "
        f"for it, because that is exact: <call>calculate({turn} * 7 + 35)</call>",
        f"I see. From the calculator's result, and after reading the problem again, I think that the answer is {turn + 1000}.",
    )
]


def make(folder: Path, model: str, episodes: int) -> None:
    """Run the episodes."""
    import yaml

    spec = {
        "spec": "episode/v1",
        "name": "view-bench",
        "model": {"path": str(Path(model).resolve()), "tool_calls": "plain", "tool_role": "user", "context": 32768},
        "backend": {
            "kind": "scripted",
            "replies": REPLIES,
        },
        "sampling": {"stop": ["</call>"]},
        "tasks": {
            "source": "python",
            "use": "engine.environments.arithmetic:problems",
            "with": {"count": episodes // SAMPLES, "seed": 0},
            "id": "id",
        },
        "prompt": [
            {"role": "system", "content": "Use the calculator for every problem: <call>calculate(2 + 3)</call>."}
        ],
        "environment": {"use": "engine.environments.arithmetic:Arithmetic", "effects": "pure"},
        "tools": [{"use": "engine.environments.tools.calculator:calculate", "effects": "pure"}],
        "user": {"use": "engine.environments.arithmetic:Teacher", "with": {"correct": 1.0, "unreadable": -0.1}},
        "machine": "tools_and_user",
        "limits": {"assistant_turns": 8, "user_turns": 8, "turn_tokens": 200},
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 256, "out": str(folder)},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    subprocess.run([sys.executable, "-m", "engine.cli.main", "run", str(path), "--quiet"], check=True)


def timed(name: str, work: Callable[[], Any], repeats: int = 1) -> None:
    """Print the median wall time and CPU time of a call, and what it returned."""
    took, used = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        found = work()
        took.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    print(f"{name:44} {statistics.median(took):8.3f} s  CPU {statistics.median(used):8.3f} s   {found}")


def main() -> None:
    """Make the store if needed, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a name of the catalogue"
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/engine-view-bench"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    folder = args.folder / str(args.episodes)
    folder.mkdir(parents=True, exist_ok=True)
    from engine.store.find import list_runs

    if not list_runs(folder):
        make(folder, args.model, args.episodes)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["EPISODE_ENGINE_CACHE"] = str(cache)

    from engine.plugins.show.listing.listing import Listing

    run = list_runs(folder)[0]
    expression = "outcome.reward < 0.5 && turns.assistant > 3 && int(task.answer) > 20"
    listing = Listing.open([run])
    timed("cold: first page", lambda: listing.page(limit=100).total)
    timed("cold: filter, reads every episode once", lambda: listing.page(expression, limit=100).total)
    listing.close()

    def opened() -> int:
        with Listing.open([run]) as again:
            return again.page(limit=100).total

    timed("warm: open and first page", opened, args.repeats)
    listing = Listing.open([run])
    number = iter(range(1_000))  # another filter each time: a repeated one is remembered
    for name, work in {
        "warm: first page": lambda: listing.page(limit=100).total,
        "warm: page 90": lambda: listing.page(offset=9_000, limit=100).total,
        "warm: sorted by reward": lambda: listing.page(sort="reward", descending=True).total,
        "warm: sorted by a reward's name": lambda: listing.page(sort="reward:reward", descending=True).total,
        "warm: filter": lambda: listing.page(f"{expression} && turns.assistant < {100 + next(number)}").total,
        "warm: filter over the last text": lambda: listing.page(f'last.text.contains("100{next(number)}")').total,
        "warm: filter over the user's turns": lambda: listing.page(f"feedback.solved || {next(number)} < 0").total,
        "warm: text search, none has it": lambda: listing.page(text=f"nobody said {next(number)}").total,
        "warm: text search, all have it": lambda: listing.page(text=f"answer is 100{next(number) % 4}").total,
        "warm: causes": lambda: len(listing.causes()),
        "warm: neighbours, repeated filter": lambda: listing.neighbours(run.name, "x/0", expression).total,
        "warm: samples of a task": lambda: len(listing.group(run.name, listing.page(limit=1).rows[0].task)),
    }.items():
        timed(name, work, args.repeats)


if __name__ == "__main__":
    main()
