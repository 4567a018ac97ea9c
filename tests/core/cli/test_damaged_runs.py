"""A run that cannot be read or made is an error with what to do, at every command: never a traceback."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed_commands import installed_of
from typer.testing import CliRunner
from written_specs import save_spec, scripted_spec

from engine.cli.main import app
from engine.store import list_runs

LONG = "x" * 5000


def spec_file(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A spec of one scripted episode."""
    spec = {
        **scripted_spec("one", tokenizer, ["It is 42."], [{"id": "a"}], tool_calls=None),
        "machine": "single_turn",
    }
    return save_spec(folder / "one.yaml", spec | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A folder with a spec and a finished run in `runs`."""
    folder = tmp_path_factory.mktemp("made")
    spec = spec_file(folder, tiny_tokenizer_dir)
    result = CliRunner().invoke(app, ["run", str(spec), "--out", str(folder / "runs"), "-q"])
    assert result.exit_code == 0, result.output
    return folder


def sql(statement: str) -> Callable[[Path], None]:
    """Change a run by SQL."""

    def change(file: Path) -> None:
        connection = sqlite3.connect(file)
        connection.executescript(statement)
        connection.close()

    return change


def random_bytes(file: Path) -> None:
    file.write_bytes(random.Random(1).randbytes(50_000))


def truncated(file: Path) -> None:
    sql("PRAGMA wal_checkpoint(TRUNCATE); PRAGMA journal_mode = DELETE;")(file)
    os.truncate(file, file.stat().st_size // 3)


def other_database(file: Path) -> None:
    file.unlink()
    sql("CREATE TABLE notes (text TEXT);")(file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "random bytes": random_bytes,
    "truncated": truncated,
    "another database": other_database,
    "an empty file": empty,
    "a newer version": sql("PRAGMA user_version = 99;"),
    "no header": sql("DELETE FROM run;"),
    "no table": sql("DROP TABLE run;"),
    "a header that is no JSON": sql("UPDATE run SET header = 'what';"),
    "a header of another shape": sql("UPDATE run SET header = '[1, 2]';"),
    "a header that is null": sql("UPDATE run SET header = 'null';"),
    "a header without a spec": sql("UPDATE run SET header = json_remove(header, '$.spec');"),
    "a spec of another shape": sql("UPDATE run SET header = json_set(header, '$.spec', json('{\"spec\": 7}'));"),
    "a journal that is no JSON": sql("UPDATE journal SET payload = '{';"),
    "a journal of another shape": sql('UPDATE journal SET payload = \'{"kind": "reset"}\';'),
    "tokens that are cut off": sql("UPDATE journal SET tokens = x'01' WHERE tokens IS NOT NULL;"),
    "a trajectory of another shape": sql("UPDATE trajectories SET trajectory = '{}';"),
    "a branch that is cut off": sql("UPDATE branches SET input_ids = x'0102';"),
}
QUICK = ("random bytes", "truncated", "another database", "a newer version", "a header of another shape")
"""Of the damages, those of the default run."""
SPEC = ("a spec of another shape",)
JOURNAL = ("a journal that is no JSON", "a journal of another shape", "tokens that are cut off")
TRAJECTORY = ("a trajectory of another shape", "a branch that is cut off")
READ_BY = {
    "show": (*TRAJECTORY, *JOURNAL, *SPEC),
    "run": (*TRAJECTORY, *JOURNAL),
    "fork": TRAJECTORY,
    "export": (*JOURNAL, *SPEC),
    "compare": (*JOURNAL, *SPEC, "a branch that is cut off"),
    "show one": (*JOURNAL, *SPEC),
}
"""By command, the damages of parts that it does not read, and does not notice."""


def commands(run: Path, folder: Path) -> dict[str, list[str]]:
    """Every command that opens a run."""
    spec = str(folder / "one.yaml")
    lines = {
        "show": ["show", str(run)],
        "show one": ["show", str(run), "a"],
        "export": ["export", str(run), "--out", str(folder / "rows.jsonl")],
        "replay": ["replay", str(run)],
        "fork": ["replay", str(run), "--from-turn", "0", "--out", str(folder / "forks")],
        "rescore": ["rescore", str(run), "--spec", spec, "--label", "again"],
        "compare": ["compare", str(run), str(run)],
        "run": ["run", "--resume", str(run), "-q"],
    }
    return installed_of(lines)


@pytest.mark.parametrize(
    "damage", [pytest.param(damage, marks=() if damage in QUICK else pytest.mark.slow) for damage in DAMAGES]
)
def test_a_damaged_run_is_an_error_at_every_command(made: Path, tmp_path: Path, damage: str) -> None:
    shutil.copy(made / "one.yaml", tmp_path)
    for name, arguments in commands(tmp_path / "run", tmp_path).items():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(list_runs(made / "runs")[0], tmp_path / "run")
        DAMAGES[damage](tmp_path / "run" / "run.db")
        result = CliRunner().invoke(app, arguments)
        told = f"{damage}, {name}: {result.output}"
        assert result.exception is None or isinstance(result.exception, SystemExit), told
        assert "Traceback" not in result.output, told
        if damage in READ_BY.get(name, ()):
            continue
        assert result.exit_code in (1, 2), told
        said = " ".join(result.output.split())
        assert "run" in said, told
        assert any(words in said for words in ("is not a run", "damaged", "version", "cannot be read")), told


@pytest.mark.parametrize("word", [LONG, f"runs/{LONG}", "/".join(["x" * 200] * 40), "nul\0"])
def test_an_over_long_name_is_an_error_at_every_command(made: Path, tmp_path: Path, word: str) -> None:
    shutil.copy(made / "one.yaml", tmp_path)
    for name, arguments in commands(Path(word), tmp_path).items():
        result = CliRunner().invoke(app, [each if each != str(Path(word)) else word for each in arguments])
        assert isinstance(result.exception, SystemExit), f"{name}: {result.exception!r}"
        assert result.exit_code in (1, 2), f"{name}: {result.output}"
        assert "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--out", "spec"])
@pytest.mark.parametrize("word", [LONG, "/".join(["x" * 200] * 40)])
def test_an_over_long_path_for_a_new_run_is_an_error(made: Path, tmp_path: Path, option: str, word: str) -> None:
    spec = str(made / "one.yaml")
    arguments = ["run", spec, "--out", str(tmp_path / word)] if option == "--out" else ["run", str(tmp_path / word)]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), result.output
    assert "too long" in " ".join(result.output.split()), result.output


def test_a_spec_with_an_over_long_name_cannot_become_a_folder(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    spec = spec_file(tmp_path, tiny_tokenizer_dir, name="n" * 300)
    result = CliRunner().invoke(app, ["run", str(spec), "--out", str(tmp_path / "runs")])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert "too long" in " ".join(result.output.split()), result.output


SIZES = [0, 100, 8192, 40_000, 130_000]
FULL_DISK = """
import json, os, resource, sys
from engine.errors import EngineError
from engine.spec.load import load_spec
from engine.store import RunHeader, RunStore

header = RunHeader.of(load_spec(sys.argv[1]))
for size in map(int, sys.argv[3:]):
    if os.fork() == 0:  # the limit cannot be lifted again
        folder = os.path.join(sys.argv[2], str(size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            RunStore.create(folder, header).close()
        except EngineError as error:
            os.write(1, (json.dumps([size, type(error).__name__, str(error), os.listdir(folder)]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


def test_a_full_disk_is_an_error_and_leaves_no_half_made_run(made: Path, tmp_path: Path) -> None:
    """Files of the new run may not grow beyond a size: the system refuses, as it does where the disk is full."""
    command = [sys.executable, "-c", FULL_DISK, made / "one.yaml", tmp_path, *map(str, SIZES)]
    work = subprocess.run(command, capture_output=True, text=True, check=True)
    assert work.stderr == ""
    told = [json.loads(line) for line in work.stdout.splitlines()]
    assert [(size, kind, left) for size, kind, _, left in told] == [(size, "StoreError", []) for size in SIZES]
    for _, _, message, _ in told:
        assert re.search("disk|File too large", message), message
