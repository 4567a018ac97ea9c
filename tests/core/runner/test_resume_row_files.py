"""A run over a shuffled file, killed with `kill -9` and resumed by another process, has the episodes of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from slow_cases import slow_but
from stopping import Resumed, content

ROWS = [{"id": f"r{at}", "text": f"Row {at} of the file."} for at in range(40)]


def write(folder: Path, kind: str) -> None:
    """The rows as a file; a Parquet file has many row groups."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in ROWS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)


def kill(path: Path, lines: str) -> str:
    """Run the spec in a process that kills itself as the lines say (see stopping.py); the exit statuses."""
    script = Path(__file__).with_name("stopping.py")
    command = [sys.executable, str(script), str(path)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["jsonl", "csv", "parquet"], "parquet"))
async def test_a_killed_run_over_a_shuffled_file_comes_to_the_same(make_spec: Any, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    path = make_spec(
        ["Done."],
        tasks={"rows": None, "source": kind, "path": f"rows.{kind}", "shuffle": 5, "split": "[:90%]", "limit": 30},
        prompt=[{"role": "user", "content": "{{text}}"}],
        rollout={"seed": 7, "concurrency": 4, "live_episodes": 4, "samples_per_task": 2},
        user=None,
        machine="tools",
    )
    path.write_text(path.read_text().replace("  rows: null\n", ""))
    resumed = Resumed(path)
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        wanted = {episode.episode_id: content(episode) for episode in store.trajectories()}
    assert len(wanted) == 60
    assert {row["id"] for row in ROWS[:30]} != {episode["task_id"] for episode in wanted.values()}  # it is shuffled
    killed = [(tmp_path / str(commit), commit) for commit in (2, 7, 15)]
    said = "".join(f"{out} {commit}\n" for out, commit in killed)
    told = await asyncio.to_thread(kill, path, said)
    assert told.split() == ["9"] * 3
    for out, _ in killed:
        await Resumed(path).run(out)
        with resumed.store(out) as store:
            assert {episode.episode_id: content(episode) for episode in store.trajectories()} == wanted
