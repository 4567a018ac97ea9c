"""The ratchet of a turn's calls: bench/calls.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def count(*options: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/calls.py"), "--check", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_turn_makes_no_more_calls_than_recorded() -> None:
    counted = count()
    assert counted.returncode == 0, counted.stdout + counted.stderr
    assert [line.split()[0] for line in counted.stdout.splitlines()[1:]] == ["plain", "loose", "thinking"]


PLANTED = """
from engine.tokens.tape import Tape

append_reply = Tape.append_reply

def more(): ...

def slower(self, *values):
    for _ in range(30):
        more()
    return append_reply(self, *values)

Tape.append_reply = slower
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_calls_that_a_turn_makes_more_are_found(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    counted = count("--workloads", "plain", path=tmp_path)
    assert counted.returncode == 1, counted.stderr
    assert "More than 2 % above size.txt:\n  plain turn, Python calls: " in counted.stdout
