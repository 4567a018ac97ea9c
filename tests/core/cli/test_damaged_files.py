"""Random damage of a run's files, at every command that reads or continues a run.

Never a traceback, never the database's own words, never fewer episodes in silence.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from installed_commands import installed_of
from typer.testing import CliRunner
from written_specs import save_spec, scripted_spec

from engine.backends.registry import open_backend
from engine.cli.main import app
from engine.runner.runner import Runner
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, ended
from engine.tokens.loading import load_format

TASKS = 24
RAW = re.compile(
    r"malformed|file is not a database|no such (table|column)|Could not decode|sqlite3\.|disk I/O error"
    r"|unable to open database|database disk image|UNIQUE constraint|NOT NULL constraint",
)


class Made(NamedTuple):
    """A run whose newest episodes are in its write-ahead log only, as a killed process leaves it."""

    folder: Path
    done: set[str]
    spec: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Made:
    folder = tmp_path_factory.mktemp("damaged")
    spec: dict[str, Any] = {
        **scripted_spec(
            "some",
            tiny_tokenizer_dir,
            [{"tool_calls": [{"name": "calculate", "arguments": {"expression": "17+25"}}]}, "It is 42." * 9],
            TASKS,
        ),
        "tools": [{"use": "engine.environments.tools.calculator:calculate"}],
        "machine": "tools",
        "limits": {"assistant_turns": 3, "turn_tokens": 128},
        "rollout": {"concurrency": 4, "live_episodes": 4},
    }
    path = save_spec(folder / "spec.yaml", spec)

    async def run() -> Made:
        loaded = load_spec(path)
        tasks = load_tasks(loaded)
        form = load_format(loaded.spec.model, loaded.base)
        store = RunStore.create(folder / "runs", RunHeader.of(loaded, run_id="some-1"))
        for part in (tasks[:8], tasks):
            backend = open_backend(loaded, form)
            await backend.start()
            await Runner(loaded, list(part), form, backend, store).run()
            await backend.close()
            if len(part) < TASKS:
                with sqlite3.connect(store.path) as connection:  # the first third is in the file itself
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copytree(store.folder, folder / "run")
        done = store.finished()
        store.close()
        return Made(folder / "run", done, path)

    made = asyncio.run(run())
    assert len(made.done) == TASKS
    assert (made.folder / "run.db-wal").stat().st_size > 50_000
    return made


def flipped(name: str, count: int = 1) -> Callable[[random.Random, Path], None]:
    def damage(rng: random.Random, folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        for _ in range(count):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(data)

    return damage


def cut(name: str) -> Callable[[random.Random, Path], None]:
    return lambda rng, folder: os.truncate(folder / name, rng.randrange((folder / name).stat().st_size))


def removed(name: str) -> Callable[[random.Random, Path], None]:
    return lambda rng, folder: (folder / name).unlink(missing_ok=True)


def zeroed_pages(name: str, page: int = 8192) -> Callable[[random.Random, Path], None]:
    def damage(rng: random.Random, folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        for _ in range(2):
            at = page * rng.randrange(len(data) // page)
            data[at : at + page] = bytes(page)
        (folder / name).write_bytes(data)

    return damage


def garbage(name: str) -> Callable[[random.Random, Path], None]:
    return lambda rng, folder: (folder / name).write_bytes(rng.randbytes(32_768))


def checkpointed(damage: Callable[[random.Random, Path], None]) -> Callable[[random.Random, Path], None]:
    """Everything is in the file itself before it is damaged."""

    def both(rng: random.Random, folder: Path) -> None:
        connection = sqlite3.connect(folder / "run.db")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        damage(rng, folder)

    return both


def header(rng: random.Random, folder: Path) -> None:
    data = bytearray((folder / "run.db").read_bytes())
    data[rng.randrange(100)] ^= 1 << rng.randrange(8)
    (folder / "run.db").write_bytes(data)


def rows_removed(rng: random.Random, folder: Path) -> None:
    """As a damaged page shows fewer rows than it had."""
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("DELETE FROM trajectories WHERE episode > 20")


DAMAGES: dict[str, Callable[[random.Random, Path], None]] = {
    "wal cut": cut("run.db-wal"),
    "wal missing": removed("run.db-wal"),
    "wal flipped": flipped("run.db-wal"),
    "wal zeroed": zeroed_pages("run.db-wal"),
    "wal garbage": garbage("run.db-wal"),
    "shm garbage": garbage("run.db-shm"),
    "file missing pages": cut("run.db"),
    "file cut": checkpointed(cut("run.db")),
    "header": header,
    "header of a closed file": checkpointed(header),
    "file flipped": checkpointed(flipped("run.db")),
    "file flipped much": checkpointed(flipped("run.db", 400)),
    "file zeroed": checkpointed(zeroed_pages("run.db")),
    "file garbage": checkpointed(garbage("run.db")),
    "rows removed": rows_removed,
    "list flipped": flipped("run.ended", 5),
    "list cut": cut("run.ended"),
}
QUICK = {("wal cut", "show"), ("wal missing", "resume"), ("file zeroed", "show"), ("header", "export")}


def commands(run: Path, spec: Path, folder: Path) -> dict[str, list[str]]:
    lines = {
        "show": ["show", str(run), "--json"],
        "show said": ["show", str(run), "--text", "42"],
        "show one": ["show", str(run), "t20"],
        "export": ["export", str(run), "--out", str(folder / "rows.jsonl")],
        "view": ["view", str(run), "--export", str(folder / "run.html")],
        "replay": ["replay", str(run)],
        "fork": ["replay", str(run), "--from-turn", "0", "--out", str(folder / "forks")],
        "rescore": ["rescore", str(run), "--spec", str(spec), "--label", "again"],
        "compare": ["compare", str(run), str(run)],
        "resume": ["run", "--resume", str(run), "-q"],
    }
    return installed_of(lines)


def complete(name: str, output: str, folder: Path, done: set[str]) -> bool | None:
    """Whether a command that ended well has all episodes; None if its output does not tell."""
    if name == "show":
        rows = json.loads(output)["rows"]
        return {row["episode"] for row in rows if row["status"] == "done"} == done
    if name == "export":
        ids = {json.loads(line)["episode_id"] for line in (folder / "rows.jsonl").read_text().splitlines()}
        return ids == done
    return None


CASES = [(damage, name, seed) for seed in range(2) for damage in DAMAGES for name in commands(Path(), Path(), Path())]


@pytest.mark.parametrize(
    ("damage", "name", "seed"),
    [pytest.param(*case, marks=() if case[2] == 0 and case[:2] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_damage_is_named(made: Made, tmp_path: Path, damage: str, name: str, seed: int) -> None:
    ended._reported.clear()
    run = tmp_path / "run"
    shutil.copytree(made.folder, run)
    DAMAGES[damage](random.Random(f"{seed} {damage}"), run)
    result = CliRunner().invoke(app, commands(run, made.spec, tmp_path)[name], env={"COLUMNS": "300"})
    told = f"{damage}, {name}, seed {seed}: exit {result.exit_code}\n{result.output}"
    assert result.exception is None or isinstance(result.exception, SystemExit), told + "".join(
        traceback.format_exception(result.exception)
    )
    assert "Traceback" not in result.output, told
    assert not RAW.search(result.output), told
    if result.exit_code == 0:
        whole = complete(name, result.stdout, tmp_path, made.done)
        assert whole is not False or "damaged" in result.output, told
        if damage in ("wal missing", "wal garbage"):
            assert "16 of 24 ended episodes are lost (" in result.output, told
    else:
        assert any(words in result.output for words in ("damaged", "not a run", "version", "cannot", "replayed")), told


@pytest.mark.parametrize("before", [False, True])
def test_what_was_lost_runs_again_and_is_not_named_any_more(made: Made, tmp_path: Path, before: bool) -> None:
    """Also where the list began in the middle of the run, as in a run of an older engine."""
    ended._reported.clear()
    run = tmp_path / "run"
    shutil.copytree(made.folder, run)
    (run / "run.db-wal").unlink()
    lines = (run / "run.ended").read_bytes().splitlines(keepends=True)
    if before:
        (run / "run.ended").write_bytes(b"".join(lines[12:]))
    result = CliRunner().invoke(app, ["run", "--resume", str(run), "-q"])
    assert result.exit_code == 0, result.output
    assert f"{12 if before else 16} of {12 if before else 24} ended episodes are lost (" in result.output
    with RunStore.open(run, readonly=True) as store:
        assert store.finished() == made.done
    ended._reported.clear()
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "rows.jsonl")])
    assert "damaged" not in result.output
    assert complete("export", result.output, tmp_path, made.done)


def test_an_episode_that_is_run_again_is_not_taken_for_lost(made: Made, tmp_path: Path) -> None:
    ended._reported.clear()
    run = tmp_path / "run"
    shutil.copytree(made.folder, run)
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("UPDATE episodes SET status = 'pending', attempt = attempt + 1 WHERE number < 5")
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 0
    assert "damaged" not in result.output
