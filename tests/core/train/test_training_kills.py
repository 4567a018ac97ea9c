"""SIGKILL at random moments of whole trainings: `bench/training_kills.py` with a few kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Five times the spread is less than the training has entries, so the fifth kill comes before its end on a slow machine too.
LONG = ["--turns", "16", "--steps", "4", "--spread", "0.4"]
AHEAD = ["--turns", "4", "--steps", "8", "--staleness", "2", "--oversample", "1.25", "--spread", "0.5"]


MIXED = ["--turns", "4", "--steps", "8", "--mix", "--difficulty"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        pytest.param(LONG, 1, id="long", marks=pytest.mark.exhaustive),
        pytest.param(AHEAD, 2, id="ahead"),
        pytest.param(MIXED, 3, id="mixed", marks=pytest.mark.exhaustive),
    ],
)
def test_five_kills(arguments: list[str], seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "training_kills.py"), "--kills", "5", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments, "--folder", str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["kills"] == 5, told
    log = (tmp_path / "output.log").read_text()
    assert told["exit_status"] == 0, log
    assert told["metrics_complete"]
    assert told["groups_trained_twice"] == 0
    # what is begun and not consumed at the end is ahead of the trainer: (max_staleness + 1) * 4 groups at most, and one more
    assert told["groups_begun"] - told["groups_consumed"] <= (13 if arguments is AHEAD else 0)
    assert told["episodes_finished_twice"] == 0
    assert told["regenerated_tokens"] == 0  # no turn that was written is sampled again
    assert told["failed"] == {}
