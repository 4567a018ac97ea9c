"""Pictures of runs: which lines they hold, to the number, and that they are pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from engine.errors import StoreError
from engine.plugins.plots.plots import Curve, Line, Panel, curve, draw, draw_curves, panels
from engine.train.metrics import MetricsLog


def run(folder: Path, name: str, values: dict[int, float]) -> Path:
    log = MetricsLog(folder)
    for step, value in values.items():
        log.write(step, {name: value})
    log.close()
    return folder


def test_rewards_are_drawn_whole_by_name_and_by_turn() -> None:
    rows = [
        {"step": 1, "reward/mean": 0.5, "reward/turn/10": 1.0, "reward/turn/2": 2.0, "reward/format": 3.0},
        {"step": 2, "reward/mean": 0.75, "episode/solved": 0.25},
    ]
    assert panels(rows)["reward"] == [
        Panel("mean reward of a batch", [Line("mean", [1, 2], [0.5, 0.75]), Line("solved", [2], [0.25])]),
        Panel("reward by name", [Line("format", [1], [3.0])]),
        Panel("reward by turn", [Line("turn 2", [1], [2.0]), Line("turn 10", [1], [1.0])]),
    ]


def test_phases_are_stacked_in_their_order_and_a_missing_one_took_no_time() -> None:
    rows = [
        {"step": 1, "time/zeta": 1.0, "time/update": 2.0, "time/rollout": 3.0},
        {"step": 2, "time/rollout": 4.0, "time/update": float("nan")},
    ]
    assert panels(rows)["time"] == [
        Panel(
            "seconds per step, by phase",
            [Line("rollout", [1, 2], [3.0, 4.0]), Line("update", [1, 2], [2.0, 0.0]), Line("zeta", [1, 2], [1.0, 0.0])],
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
    log.close()
    made = draw(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in made] == [
        f"plots/{name}.png" for name in ("reward", "eval", "policy", "sampler", "staleness", "time")
    ]
    for file in made:
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 8  # axes, text and a line at least


def test_a_curve_is_the_mean_of_the_seeds_where_all_were_measured(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", "reward/mean", {1: 0.0, 2: 0.5, 3: 1.0}),
        run(tmp_path / "b", "reward/mean", {1: 0.5, 2: 0.25}),
    ]
    assert curve(runs, "reward/mean") == Curve([1, 2], [0.25, 0.375], [0.0, 0.25], [0.5, 0.5])


def test_seeds_with_no_step_in_common_are_an_error(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", "loss", {1: 0.0}), run(tmp_path / "b", "loss", {2: 0.0})]
    with pytest.raises(StoreError, match="no step has 'loss' in all of these runs"):
        curve(runs, "loss")


def test_curves_of_several_kinds_are_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {
        label: [run(tmp_path / f"{label}{seed}", "reward/mean", {1: 0.1 * seed, 2: height}) for seed in range(3)]
        for label, height in (("turns", 0.9), ("outcome", 0.4))
    }
    out = draw_curves(runs, "reward/mean", tmp_path / "deep" / "curves.png", target=0.9, title="credit")
    with Image.open(out) as image:
        assert image.size == (616, 396)
