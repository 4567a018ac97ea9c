"""Memory and time of loading a million rows: `python bench/many_rows.py [ROWS] [jsonl|csv|parquet]`.

Prints the time to load and check all rows, the time to read tasks in a shuffled order, and how much the resident memory of
the process grew. The rows are written into a temporary folder first.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks

READ = 2_000
"""Tasks that are read in the shuffled order."""


def resident() -> float:
    """Resident memory now, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def write(path: Path, kind: str, rows: int) -> None:
    """Rows of about 500 bytes."""
    made = ({"id": f"row-{at}", "question": f"{at} " + "word " * 90, "answer": str(at)} for at in range(rows))
    if kind == "jsonl":
        with path.open("w") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in made)
    elif kind == "csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "question", "answer"])
            writer.writeheader()
            writer.writerows(made)
    else:
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "question", "answer")])
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            while part := list(islice(made, 10_000)):
                writer.write_table(pyarrow.Table.from_pylist(part, schema))


def main() -> None:
    """Write, load, read."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    kind = sys.argv[2] if len(sys.argv) > 2 else "jsonl"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{kind}"
        write(path, kind, rows)
        spec = Path(folder) / "spec.yaml"
        spec.write_text(
            "spec: episode/v1\nname: rows\nmodel: {path: m}\n"
            f"tasks: {{source: {kind}, path: {path.name}, id: id, shuffle: 1}}\n"
        )
        loaded = load_spec(spec)
        load_tasks(load_spec(spec, ["tasks.limit=1", "tasks.shuffle=null"]))
        before, began = resident(), time.perf_counter()
        tasks = load_tasks(loaded)
        took = time.perf_counter() - began
        size = path.stat().st_size / 2**20
        print(
            f"{len(tasks):,} rows of {kind} ({size:,.0f} MiB) loaded in {took:.1f} s; {resident() - before:.0f} MiB more resident"
        )
        for which, first in (("the first", 0), ("the next", READ)):
            count = min(READ, len(tasks) - first)
            began = time.process_time()
            for at in range(first, first + count):
                tasks[at]
            took = (time.process_time() - began) / max(count, 1)
            print(f"a task in shuffled order, {which} {count:,}: {took * 1e6:.0f} µs of CPU time")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"{resident() - before:.0f} MiB more resident, peak {peak:.0f} MiB in all")


if __name__ == "__main__":
    main()
