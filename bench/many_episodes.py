"""Resident memory of a run of many episodes with several drivers: `python bench/many_episodes.py [--episodes 100000] [--drivers 2]`.

Runs `engine run` with scripted episodes of two turns (a tool call and an answer), and prints the resident memory of the command, the coordinator
and each driver while it runs. At the end: the growth of each in bytes per episode, from the first fifth of the run to its end. Needs the
extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SAMPLES = 8
START = 0.2
"""The part of the run after which growth is measured: until then caches fill."""
NAMES = {"Coordinator": "coordinator", "Driver": "driver"}


class Point(NamedTuple):
    """One look at a run."""

    seconds: float
    episodes: int
    """Episodes of finished groups."""
    rss: Mapping[str, int]
    """Resident bytes by process: `command`, `coordinator`, `driver <pid>`."""


def spec_of(folder: Path, model: str, episodes: int, drivers: int) -> Path:
    """Write the spec of the run and its code."""
    (folder / "many_tasks.py").write_text(
        "def rows(count: int) -> list[dict]:\n    return [{'id': f't{at}'} for at in range(count)]\n\n\n"
        'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: One.\n        b: The other.\n    """\n    return a + b\n'
    )
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "many",
        "model": {"path": model, "tool_calls": "hermes", "tool_role": "user"},
        "backend": {
            "kind": "scripted",
            "replies": [{"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]}, "It is 3."],
        },
        "tasks": {"source": "python", "use": "many_tasks:rows", "with": {"count": -(-episodes // SAMPLES)}, "id": "id"},
        "prompt": [{"role": "user", "content": "Add 1 and 2 for {{id}}."}],
        "tools": [{"use": "many_tasks:add"}],
        "machine": "tools",
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 64, "drivers": drivers},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def processes(command: int) -> dict[str, int]:
    """Resident bytes of a command and of its actors."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,rss,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()[1:]]
    family = {command}
    for _ in range(4):
        family |= {int(row[0]) for row in rows if int(row[1]) in family}
    found = {}
    for pid, _, kilobytes, words in rows:
        if int(pid) == command:
            found["command"] = 1024 * int(kilobytes)
        for actor, name in NAMES.items():
            if int(pid) in family and words.startswith(f"ray::{actor}"):
                found[name if actor == "Coordinator" else f"{name} {pid}"] = 1024 * int(kilobytes)
    return found


def finished(out: Path) -> int:
    """Episodes of the groups that are done, by the coordinator's file."""
    for file in out.glob("*/leases.db"):
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
                return SAMPLES * int(
                    connection.execute("SELECT count(*) FROM groups WHERE state = 'done'").fetchone()[0]
                )
        except sqlite3.OperationalError:  # it is being made
            return 0
    return 0


def run(folder: Path, model: str, episodes: int, drivers: int, every: float, *, show: bool = True) -> list[Point]:
    """Run all episodes, and look at the memory every so many seconds.

    Raises:
        CalledProcessError: the command failed.
    """
    spec = spec_of(folder, model, episodes, drivers)
    words = [sys.executable, "-m", "engine.cli.main", "run", str(spec), "-q", "--out", str(folder / "runs")]
    command = subprocess.Popen(
        words, cwd=folder, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL
    )
    began, points = time.perf_counter(), list[Point]()
    while True:
        try:
            status = command.wait(every)
        except subprocess.TimeoutExpired:
            points.append(Point(time.perf_counter() - began, finished(folder / "runs"), processes(command.pid)))
            if show:
                print(line(points[-1]), flush=True)
            continue
        if status:
            raise subprocess.CalledProcessError(status, words)
        return points


def line(point: Point) -> str:
    """One look, as text."""
    each = "  ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(point.rss.items()))
    return f"{point.seconds:6.0f} s {point.episodes:7d} episodes  {each}"


def growth(points: list[Point], episodes: int) -> dict[str, float]:
    """Bytes per episode by which each process has grown, from the first fifth of the run to its last look; the peak counts."""
    names = {name for point in points for name in point.rss}
    found = {}
    for name in sorted(names):
        later = [point for point in points if point.episodes >= START * episodes and name in point.rss]
        if len(later) > 1 and later[-1].episodes > later[0].episodes:
            peak = max(point.rss[name] for point in later)
            found[name] = (peak - later[0].rss[name]) / (later[-1].episodes - later[0].episodes)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a folder with a tokenizer, or a catalogue name"
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--out", help="folder for the run; by default a temporary one")
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="bench-episodes-") as name:
        folder = Path(arguments.out or name)
        folder.mkdir(parents=True, exist_ok=True)
        points = run(folder, model, arguments.episodes, arguments.drivers, arguments.every)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    for each, grown in growth(points, arguments.episodes).items():
        print(f"{each}: {grown:+.0f} bytes per episode")
    print(json.dumps({"seconds": round(points[-1].seconds), "load": os.getloadavg()[0], "disk_bytes": size}))


if __name__ == "__main__":
    main()
