"""Every benchmark can be imported: one that nobody runs would otherwise break unnoticed when a name moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
PROGRAM = """
import importlib, sys
from pathlib import Path
folders = [Path(sys.argv[1]) / name for name in ("bench", "scripts", "tests/kit")]
own = {path.stem for folder in folders for path in folder.glob("*.py")} | {"engine"}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a package that the benchmark alone needs
        if error.name.partition(".")[0] in own:
            raise
"""


@pytest.mark.slow
def test_every_benchmark_is_imported() -> None:
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    command = [sys.executable, "-c", PROGRAM, str(BENCH.parent), *names]
    ended = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
