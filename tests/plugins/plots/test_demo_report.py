"""What the demonstrations' script keeps of a training, and the table that it makes of it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "demo_report.py"


def report(*arguments: Path | str) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_what_matters_is_kept_and_drawn(tmp_path: Path) -> None:
    training = tmp_path / "runs" / "arithmetic-0" / "a-training"
    training.mkdir(parents=True)
    rows = [
        {"step": 0, "time": 5.0, "eval/reward": 0.25, "eval/turns": 2.0, "time/eval": 6.0},
        {
            "step": 1,
            "reward/mean": 1 / 3,
            "reward/form": 0.1,
            "episodes/count": 64.0,
            "step_seconds": 30.0,
            "loss": 1.0,
        },
        {"step": 2, "reward/mean": 0.9, "episodes/count": 128.0, "eval/reward": 0.95, "step_seconds": 24.0},
    ]
    (training / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "demos" / "arithmetic-0.jsonl"
    report("keep", training.parent, file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 0, "eval/reward": 0.25, "time/eval": 6},
        {"step": 1, "reward/mean": 0.3333, "episodes/count": 64, "step_seconds": 30},
        {"step": 2, "reward/mean": 0.9, "episodes/count": 128, "eval/reward": 0.95, "step_seconds": 24},
    ]
    assert report("draw", file.parent).splitlines()[2:] == [
        "| arithmetic | 0 | 0.33 | 0.62 | 0.25 | 0.95 | 192 | 1.0 |"
    ]
    assert (file.parent / "arithmetic.png").read_bytes().startswith(b"\x89PNG")
    assert not (file.parent / "credit.png").exists()


def measured(folder: Path, name: str, values: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, name: value}) + "\n" for step, value in values.items())
    )
    return folder


def test_a_curve_is_the_mean_of_the_seeds_where_all_were_measured(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    runs = [
        measured(tmp_path / "a", "reward/mean", {1: 0.0, 2: 0.5, 3: 1.0}),
        measured(tmp_path / "b", "reward/mean", {1: 0.5, 2: 0.25}),
    ]
    assert script["curve"](runs, "reward/mean") == ([1, 2], [0.25, 0.375], [0.0, 0.25], [0.5, 0.5])
    with pytest.raises(SystemExit, match="no step has 'loss' in all of these runs"):
        script["curve"](runs, "loss")
