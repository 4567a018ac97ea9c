"""Seconds and memory of queries over the shards of a million episodes: the engine's readers, and DuckDB and pyarrow on the same files.

    python bench/shards.py --model ../tokenizers/qwen3 [--parts 200] [--episodes 5000] [--folder /tmp/engine-shards-bench]

One part is made by a run with the scripted backend and the engine's publisher; the others are copies of it with other task ids. They
are kept in the folder. Each query runs in a process of its own: `peak` is that process's, `over` what it needs beside its imports.
Figures of `cold` are with an empty cache, those of `warm` with the catalogue that the ones before have made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

SAMPLES = 8
DRIVERS = 4
ABOVE = 1.5
"""Episodes with a greater reward are looked for."""

USER = """
import random

from engine.schemas.environment import UserTurn
from engine.schemas.reward import RewardEvent


class Marks:
    def respond(self, view):
        mark = round(random.Random(f"{view.seed} {view.turn}").random(), 3)
        return UserTurn(content="Again.", rewards=[RewardEvent(name="mark", value=mark)], satisfied=view.turn > 0)
"""
"""A user who gives a random mark for each of two replies."""


def make(folder: Path, model: str, episodes: int, parts: int) -> None:
    """Run the episodes of one part, publish it, and copy it."""
    import yaml

    from engine.plugins.drivers.places import ShardPlace
    from engine.plugins.drivers.publisher import Publisher
    from engine.plugins.drivers.shards import Part, create_shards
    from engine.store.find import list_runs
    from engine.store.reading import own_header

    spec = {
        "spec": "episode/v1",
        "name": "shards-bench",
        "model": {"path": str(Path(model).resolve()), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": ["It is 12.", "It is 15."]},
        "tasks": {
            "source": "python",
            "use": "engine.environments.arithmetic:problems",
            "with": {"count": episodes // SAMPLES, "seed": 0},
            "id": "id",
        },
        "environment": {"use": "engine.environments.arithmetic:Arithmetic"},
        "user": {"use": "marks:Marks"},
        "machine": "retry_with_feedback",
        "limits": {"assistant_turns": 3},
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 256, "out": str(folder / "runs")},
    }
    (folder / "marks.py").write_text(USER)
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "run", str(file), "--quiet"], check=True, stdout=subprocess.DEVNULL
    )
    (run,) = list_runs(folder / "runs")
    place = create_shards(run, own_header(run), str(folder / "shards"))
    publisher = Publisher(run, place, "0")
    publisher.publish(publisher.ready())
    for number in range(1, parts):
        copy(
            folder / "shards",
            Part(driver="0", number=0),
            Part(driver=str(number % DRIVERS), number=number // DRIVERS),
            number,
        )
    (folder / "shards" / "status.json").unlink()
    assert len(ShardPlace(place).names()) == 3 * parts + 1


def copy(folder: Path, source: Any, target: Any, number: int) -> None:
    """Write a part again with other task ids: `sum-0-0012` becomes `sum-<number>-0012`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    old, new = "sum-0-", f"sum-{number}-"
    store = folder / f"{target.name}.db"
    shutil.copyfile(folder / f"{source.name}.db", store)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        tasks = connection.execute("SELECT count(*) FROM tasks").fetchone()[0]
        connection.execute(
            "UPDATE tasks SET id = replace(id, ?, ?), position = position + ?", (old, new, number * tasks)
        )
        connection.execute(
            "UPDATE episodes SET id = replace(id, ?1, ?2), task_id = replace(task_id, ?1, ?2), task_index = task_index + ?3",
            (old, new, number * tasks),
        )
        connection.execute("UPDATE trajectories SET trajectory = replace(trajectory, ?, ?)", (old, new))
    for before, after in ((f"{source.name}.parquet", f"{target.name}.parquet"), (source.mark, target.mark)):
        table = pq.read_table(folder / before)
        for name in ("id", "task_id", "episode_id"):
            if name in table.column_names:
                at = table.column_names.index(name)
                table = table.set_column(at, table.field(at), pc.replace_substring(table.column(at), old, new))
        at = table.column_names.index("task_index")
        moved = pc.add(table.column(at), pa.scalar(number * tasks, table.field(at).type))
        table = table.set_column(at, table.field(at), moved)
        pq.write_table(table, folder / after, compression="zstd")


# --- what is measured: each gives what it found, which must be equal for the engine and the others ---


def opened(folder: Path) -> Any:
    """The run of the shards."""
    from engine.store import RunStore, find_run

    return RunStore.open(find_run(str(folder / "shards")), readonly=True)


def listing(folder: Path) -> Any:
    """The list of its episodes."""
    from engine.plugins.show.listing.listing import Listing
    from engine.store import find_run

    return Listing([find_run(str(folder / "shards"))])


def open_run(folder: Path) -> Any:
    """Open the run: what is new in its shards is read."""
    with opened(folder).snapshot() as connection:
        return connection.execute("SELECT count(*) FROM episodes").fetchone()[0]


def mean_by_task(folder: Path) -> Any:
    """Mean reward by task: tasks, and the sum of their means."""
    with opened(folder).snapshot() as connection:
        query = "SELECT task_id, avg(reward) FROM episodes GROUP BY task_id"
        rows = connection.execute(query).fetchall()
    return len(rows), round(sum(mean for _, mean in rows), 3)


def summaries(folder: Path) -> Any:
    """All summaries as objects: `RunStore.episodes`."""
    return sum(1 for _ in opened(folder).episodes())


def totals(folder: Path) -> Any:
    """Number of episodes and mean reward, as `engine show` prints them."""
    with listing(folder) as found:
        told = found.totals()
        return told.episodes, round(told.reward, 6)


def page(folder: Path) -> Any:
    """The 100 episodes with the greatest reward."""
    with listing(folder) as found:
        return found.page(None, None, "reward", True, 0, 100).total


def choose(folder: Path) -> Any:
    """Number of episodes with a reward above a bound, with the first 50, as `engine show --filter` prints them."""
    with listing(folder) as found:
        return found.page(f"outcome.reward > {ABOVE}", limit=50).total


def trained(folder: Path) -> Any:
    """Sum of trained tokens, by a filter that holds for all."""
    from engine.plugins.show.listing.rows import MADE

    with listing(folder) as found:
        found.totals("episode.trained >= 0")
        ((trained,),) = chain(*found._each(f"SELECT sum({MADE['trained']}) {{}}", None))
        return trained


def _once(folder: Path) -> str:
    """The summaries of the episodes, each once, as docs/rows.md says."""
    return (
        f"(SELECT * FROM read_parquet('{folder}/shards/episodes-*.parquet', filename = true) "
        "QUALIFY row_number() OVER (PARTITION BY id ORDER BY attempt DESC, filename) = 1)"
    )


def duckdb_mean_by_task(folder: Path) -> Any:
    """As `mean_by_task`."""
    import duckdb

    query = f"SELECT task_id, avg(reward) FROM {_once(folder)} GROUP BY task_id"
    rows = duckdb.sql(query).fetchall()
    return len(rows), round(sum(mean for _, mean in rows), 3)


def duckdb_totals(folder: Path) -> Any:
    """As `totals`."""
    import duckdb

    count, mean = duckdb.sql(f"SELECT count(*), avg(reward) FROM {_once(folder)}").fetchall()[0]
    return count, round(mean, 6)


def duckdb_choose(folder: Path) -> Any:
    """As `choose`."""
    import duckdb

    return duckdb.sql(f"SELECT count(*) FROM {_once(folder)} WHERE reward > {ABOVE}").fetchall()[0][0]


def duckdb_trained(folder: Path) -> Any:
    """As `trained`, from the training rows of all parts; there are no duplicates here."""
    import duckdb

    query = f"SELECT sum(list_sum(loss_mask)) FROM read_parquet('{folder}/shards/part-*.parquet')"
    return int(duckdb.sql(query).fetchall()[0][0])


def pyarrow_choose(folder: Path) -> Any:
    """As `choose`, by a data set of pyarrow, which leaves duplicates in; there are none here."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    files = sorted(map(str, (folder / "shards").glob("episodes-*.parquet")))
    return ds.dataset(files).count_rows(filter=pc.field("reward") > ABOVE)


def pyarrow_mean_by_task(folder: Path) -> Any:
    """As `mean_by_task`, in the same way."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    files = sorted(map(str, (folder / "shards").glob("episodes-*.parquet")))
    table = ds.dataset(files).to_table(columns=["task_id", "reward"])
    means = table.group_by("task_id").aggregate([("reward", "mean")])
    return means.num_rows, round(pc.sum(means["reward_mean"]).as_py(), 3)


PLAN: list[tuple[str, Callable[[Path], Any], Callable[[Path], Any] | None]] = [
    ("open, cold: the catalogue is made", open_run, None),
    ("open, warm", open_run, None),
    ("mean reward by task, SQL on the catalogue", mean_by_task, duckdb_mean_by_task),
    ("  pyarrow", pyarrow_mean_by_task, duckdb_mean_by_task),
    ("all summaries as objects", summaries, None),
    ("totals of `engine show`", totals, duckdb_totals),
    ("100 greatest rewards", page, None),
    ("reward > 1.5 by a filter", choose, duckdb_choose),
    ("  pyarrow", pyarrow_choose, duckdb_choose),
    ("trained tokens by a filter: the stores of the parts are read", trained, duckdb_trained),
]


def peak_memory() -> float:
    """Greatest resident memory of this process so far, in MiB; `ru_maxrss` would begin with that of the parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**10


def run_one(name: str, folder: Path) -> None:
    """Print seconds, CPU seconds, peak memory and what a function found, as JSON. Imports are not timed."""
    work = globals()[name]
    if name.startswith("duckdb"):
        import duckdb  # noqa: F401
    elif name.startswith("pyarrow"):
        import pyarrow.compute
        import pyarrow.dataset
    else:
        import pyarrow.parquet  # noqa: F401

        import engine.plugins.show.listing.listing
        import engine.store  # noqa: F401

    before = peak_memory()
    began, cpu = time.perf_counter(), time.process_time()
    found = work(folder)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    peak = peak_memory()
    print(json.dumps({"seconds": took, "cpu": used, "peak": peak, "over": peak - before, "found": found}))


def child(work: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    """Measure a function in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--one", work.__name__]
    told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return told


def main() -> None:
    """Make the shards if needed, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a name of the catalogue"
    )
    parser.add_argument("--parts", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=5000, help="of one part")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/engine-shards-bench"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.folder)
        return
    folder = (args.folder / f"{args.parts}x{args.episodes}").resolve()
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder, args.model, args.episodes, args.parts)
        (folder / "done").touch()
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["EPISODE_ENGINE_CACHE"] = str(cache)
    files = list((folder / "shards").iterdir())
    size = sum(file.stat().st_size for file in files) / 2**20
    print(
        f"{args.parts * args.episodes:,} episodes in {args.parts} parts, {len(files)} files, {size:,.0f} MiB; load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':54} {'s':>8} {'CPU s':>8} {'peak MiB':>9} {'over':>6}   {'DuckDB s':>8} {'over':>6} {'ratio':>7}")
    for name, work, other in PLAN:
        told = child(work, folder)
        line = f"{name:54} {told['seconds']:8.2f} {told['cpu']:8.2f} {told['peak']:9.0f} {told['over']:6.0f}"
        if other is not None:
            baseline = child(other, folder)
            assert told["found"] == baseline["found"], (name, told["found"], baseline["found"])
            line += (
                f"   {baseline['seconds']:8.2f} {baseline['over']:6.0f} {told['seconds'] / baseline['seconds']:7.1f}"
            )
        print(f"{line}   {told['found']}", flush=True)


if __name__ == "__main__":
    main()
