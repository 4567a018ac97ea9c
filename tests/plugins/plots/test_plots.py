"""Pictures of runs: which lines they hold, to the number, and that they are pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from engine.plugins.plots.plots import MetricLine, PlotPanel, draw, panels
from engine.train.metrics import MetricsLog


def test_rewards_are_drawn_whole_by_name_and_by_turn() -> None:
    rows = [
        {"step": 1, "reward/mean": 0.5, "reward/turn/10": 1.0, "reward/turn/2": 2.0, "reward/format": 3.0},
        {"step": 2, "reward/mean": 0.75, "episode/solved": 0.25},
    ]
    assert panels(rows)["reward"] == [
        PlotPanel(
            "mean reward of a batch", [MetricLine("mean", [1, 2], [0.5, 0.75]), MetricLine("solved", [2], [0.25])]
        ),
        PlotPanel("reward by name", [MetricLine("format", [1], [3.0])]),
        PlotPanel("reward by turn", [MetricLine("turn 2", [1], [2.0]), MetricLine("turn 10", [1], [1.0])]),
    ]


def test_phases_are_stacked_in_their_order_and_a_missing_one_took_no_time() -> None:
    rows = [
        {"step": 1, "time/zeta": 1.0, "time/update": 2.0, "time/rollout": 3.0},
        {"step": 2, "time/rollout": 4.0, "time/update": float("nan")},
    ]
    assert panels(rows)["time"] == [
        PlotPanel(
            "seconds per step, by phase",
            [
                MetricLine("rollout", [1, 2], [3.0, 4.0]),
                MetricLine("update", [1, 2], [2.0, 0.0]),
                MetricLine("zeta", [1, 2], [1.0, 0.0]),
            ],
            stacked=True,
        )
    ]


def test_what_was_never_measured_has_no_picture() -> None:
    assert panels([{"step": 1, "loss": 1.0}]) == {}
    assert list(panels([{"step": 1, "staleness/mean": 1.0, "eval/reward": 0.5}])) == ["eval", "staleness"]


@pytest.mark.slow
def test_a_runs_pictures_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = MetricsLog(tmp_path)
    for step in range(1, 4):
        log.write(
            step,
            {
                "reward/mean": step / 4, "reward/correct": step / 4, "reward/turn/0": 0.1, "eval/reward": 0.2,
                "eval/tokens": 30.0, "policy/approx_kl": 1e-4, "policy/clip_low": 0.0, "policy/entropy": float("nan"),
                "policy/ess": 0.9, "sampler/diff_mean": 1e-6, "staleness/mean": 0.0, "time/rollout": 2.0, "time/sync": 1.0,
            },
        )  # fmt: skip
    made = draw(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in made] == [
        f"plots/{name}.png" for name in ("reward", "eval", "policy", "sampler", "staleness", "time")
    ]
    for file in made:
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 8  # axes, text and a line at least
