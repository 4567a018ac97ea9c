"""Seconds and memory of `engine show` and of the lists behind it and `engine view`, over a million episodes in one store.

    python bench/view.py --model ../tokenizers/qwen3 [--episodes 1000000] [--folder /tmp/engine-view-bench] [--only WORD]
    python bench/view.py … --older OTHER_CHECKOUT     # the same commands of another revision beside, on the same store
    python bench/view.py … --turns 8                  # episodes of 8 turns, 8 GB in all
    python bench/view.py … --without-summaries        # a store as older engines wrote it, with 1 % of the episodes

2,000 episodes are made by a run with the scripted backend; the others are copies of them with other ids, journals left out. The store is
kept in the folder. Each row is a process of its own, with an empty cache folder: seconds from its start to its end, and the most memory
that it had resident.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

MADE = 2_000
SAMPLES = 8

USER = """
import random

from engine.schemas.environment import UserTurn
from engine.schemas.reward import RewardEvent


class Marks:
    def respond(self, view):
        mark = round(random.Random(f"{view.seed} {view.turn}").random(), 3)
        facts = {"tries": view.turn + 1, "mark": mark, "level": "hard" if mark > 0.5 else "easy"}
        rewards = [RewardEvent(name="mark", value=mark)]
        return UserTurn(content="Again.", rewards=rewards, satisfied=view.turn + 1 >= TURNS, facts=facts)
"""
"""A user who gives a random mark for each of TURNS replies."""
REPLIES = ("It is 12.", "It is 15.")

SHOW = "import sys; from engine.cli.main import main; sys.argv[0] = 'engine'; main()"
LISTING = """
import sys
import engine.plugins.show.listing.listing as module
from engine.plugins.show.listing.sources import find
with module.Listing([find(sys.argv[1])]) as listing:
    {}
"""
EPISODES = """
import sys
from engine.store import RunStore
for row in RunStore.open(sys.argv[1], readonly=True).episodes():
    pass
"""
COMMANDS: dict[str, list[str]] = {
    "nothing: --help": [SHOW, "show", "--help"],
    "first 50": [SHOW, "show", "RUN", "--limit", "50"],
    "50 with outcome.reward > 1.5": [SHOW, "show", "RUN", "--limit", "50", "--filter", "outcome.reward > 1.5"],
    "50 by reward, the greatest first": [SHOW, "show", "RUN", "--limit", "50", "--sort", "-reward"],
    "50 by one reward": [SHOW, "show", "RUN", "--limit", "50", "--sort", "-reward:mark"],
    "50 with a fact": [SHOW, "show", "RUN", "--limit", "50", "--filter", "facts.mark > 0.999"],
    "50 with fields of the task": [SHOW, "show", "RUN", "--limit", "50", "--filter", 'task.answer == "12" && turns.assistant > 1'],
    "50 that have a value for none but 1": [SHOW, "show", "RUN", "--limit", "50", "--filter", 'outcome.reward > 1.99 && last.text.contains("15")'],
    "50 in an expression without SQL": [SHOW, "show", "RUN", "--limit", "50", "--filter", "facts.tries + 1 > 2"],
    "page 10,000 of a list": [LISTING.format("listing.page(offset=500_000, limit=50)"), "RUN"],
    "page 1,000 of a filter by reward": [LISTING.format("listing.page('outcome.reward > 1.0', sort='reward', offset=50_000, limit=50)"), "RUN"],
    "neighbours in a filter": [LISTING.format("listing.neighbours(listing.sources[0].key, listing.page(limit=1).rows[0].episode, 'outcome.reward > 0.1')"), "RUN"],
    "view: numbers of a run": [LISTING.format("from engine.plugins.view.home import numbers_of; numbers_of(listing, listing.sources[0].key)"), "RUN"],
    "view: charts": [LISTING.format("from engine.plugins.view.charts import charts_of; charts_of(listing, '', '')"), "RUN"],
    "RunStore.episodes": [EPISODES, "RUN"],
}  # fmt: skip


def make(folder: Path, model: str, episodes: int, turns: int, *, without: bool) -> None:
    """Run some episodes, and copy them."""
    import yaml

    from engine.store.find import list_runs

    replies = [REPLIES[turn == turns - 1] for turn in range(turns)]
    spec = {
        "spec": "episode/v1",
        "name": "view-bench",
        "model": {"path": str(Path(model).resolve()), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": replies},
        "tasks": {
            "source": "python",
            "use": "engine.environments.arithmetic:problems",
            "with": {"count": MADE // SAMPLES, "seed": 0},
            "id": "id",
        },
        "environment": {"use": "engine.environments.arithmetic:Arithmetic"},
        "user": {"use": "marks:Marks"},
        "machine": "retry_with_feedback",
        "limits": {"assistant_turns": turns + 1},
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 256, "out": str(folder)},
    }
    (folder / "marks.py").write_text(USER.replace("TURNS", str(turns)))
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    subprocess.run([sys.executable, "-m", "engine.cli.main", "run", str(file), "--quiet"], check=True)
    (run,) = list_runs(folder)
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("DELETE FROM journal")
        connection.execute("UPDATE run SET header = json_remove(header, '$.plugins')")  # older engines do not know it
        tables = {
            table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            for table in ("tasks", "episodes", "trajectories", "branches", "postings", "summaries")
        }
        for copy in range(1, episodes // MADE):
            changed = {
                "id": f"replace(id, 'sum-0-', 'sum-{copy}-')",
                "task_id": f"replace(task_id, 'sum-0-', 'sum-{copy}-')",
                "position": f"position + {copy * MADE // SAMPLES}",
                "task_index": f"task_index + {copy * MADE // SAMPLES}",
                "number": f"number + {copy * MADE}",
                "episode": f"episode + {copy * MADE}",
                "trajectory": f"replace(trajectory, 'sum-0-', 'sum-{copy}-')",
                "reward": f"reward + {copy} * 1e-9",
            }
            connection.execute("BEGIN")
            for table, names in tables.items():
                key = {"tasks": "position", "episodes": "number"}.get(table, "episode")
                first = MADE // SAMPLES if table == "tasks" else MADE + 1
                values = ", ".join(changed.get(name, f'"{name}"') for name in names)
                connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {key} < {first}")
            connection.execute("COMMIT")
        if without:
            connection.execute("DROP TABLE summaries")
    (run / "run.ended").unlink(missing_ok=True)


def measured(command: list[str], run: Path, cache: Path, checkout: Path | None) -> tuple[float, float, int]:
    """Return seconds, MiB and exit status of a command."""
    shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "EPISODE_ENGINE_CACHE": str(cache)}
    words = list(command)
    if checkout is not None:
        words[0] = words[0].replace("module.Listing(", "module.Listing.open(")
        environment["PYTHONPATH"] = str(checkout)
        words[0] = words[0].replace("engine.plugins.show.listing.listing", "engine.view.listing")
        words[0] = words[0].replace("engine.plugins.show.listing.sources", "engine.view.sources")
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", words[0], *(str(run) if word == "RUN" else word for word in words[1:])],
        cwd=run.parent,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    return time.perf_counter() - began, usage.ru_maxrss / 2**10, os.waitstatus_to_exitcode(status)


def main() -> None:
    """Make the store if needed, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a catalogue name"
    )
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/engine-view-bench"))
    parser.add_argument("--turns", type=int, default=len(REPLIES), help="turns of an episode")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--older", type=Path, help="a checkout of another revision")
    parser.add_argument("--without-summaries", action="store_true", help="as an older engine wrote it")
    args = parser.parse_args()
    from engine.store.find import list_runs

    turns = f"-{args.turns}-turns" if args.turns != len(REPLIES) else ""
    folder = (args.folder / f"{args.episodes}{turns}{'-without' * args.without_summaries}").resolve()
    if not list_runs(folder):
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, args.model, args.episodes, args.turns, without=args.without_summaries)
    (run,) = list_runs(folder)
    size = (run / "run.db").stat().st_size / 2**20
    print(f"{args.episodes:,} episodes, {size:,.0f} MiB; load {os.getloadavg()[0]:.1f}")
    print(f"{'':40} {'s':>8} {'MiB':>6} {'older s':>10} {'MiB':>6} {'ratio':>7}")
    for name, command in COMMANDS.items():
        if args.only in name:
            seconds, memory, status = measured(command, run, folder / "cache", None)
            line = f"{name:40} {seconds:8.2f} {memory:6.0f}"
            if args.older is not None:
                before, more, _ = measured(command, run, folder / "cache", args.older)
                line += f" {before:10.2f} {more:6.0f} {before / seconds:7.1f}"
            print(line + (f"   exit status {status}" if status else ""), flush=True)


if __name__ == "__main__":
    main()
