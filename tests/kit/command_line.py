"""`engine …` in this process: for what does not depend on the process, which takes a second to start."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app


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
