"""`engine …` in this process, for what does not depend on the process, which takes a second to start; or as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schemas.trajectory import Trajectory
from engine.store import RunStore, find_run

ROOT = Path(__file__).parents[2]
ENGINE = [sys.executable, "-m", "engine.cli.main"]
"""`engine` as the first words of a process's command."""


def engine_here(*arguments: str | Path, cwd: Path, columns: int = 200) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `engine` with these arguments.

    Args:
        arguments: What follows `engine` on the command line.
        cwd: The folder that it is called in.
        columns: Width of the terminal.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        result = CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": str(columns)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def engine_output(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `engine` with these arguments in the current folder."""
    result = CliRunner().invoke(app, [str(word) for word in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_to_store(spec: Path, out: Path, *options: str, settings: Iterable[str] = ()) -> RunStore:
    """The store of a run of this spec under `out`, open for reading. `settings`: values of `--set`.

    Raises:
        AssertionError: The command failed.
    """
    changes = [word for setting in settings for word in ("--set", setting)]
    code, output = engine_output("run", spec, "--quiet", "--out", out, *options, *changes)
    assert code == 0, output
    return RunStore.open(find_run("latest", out), readonly=True)


def trajectories_of(run: Path) -> list[Trajectory]:
    """The trajectories of the run in this folder."""
    with RunStore.open(run, readonly=True) as store:
        return list(store.trajectories())


def engine_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The variables of a process that finds the engine and the modules in `folders`."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "200"} | variables


def engine_process(
    *arguments: str | Path, cwd: Path | None = None, modules: Iterable[Path] = (), **variables: str
) -> subprocess.Popen[str]:
    """`engine …` as a process with its output in pipes, which finds the modules in the folders `modules` too."""
    environment = engine_environment(*modules, **variables)
    command = [*ENGINE, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process, which must end within so many seconds, and is killed then."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def engine_apart(
    *arguments: str | Path, cwd: Path | None = None, modules: Iterable[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """`engine …` as a process, at its end. `modules`: folders of modules that it finds too."""
    process = engine_process(*arguments, cwd=cwd, modules=modules, **variables)
    return subprocess.CompletedProcess(process.args, *ended(process))
