"""What the demonstrations came to: curves as PNG, and a table.

python scripts/demo_report.py keep TRAINING FILE     a training's metrics that matter here, rounded
python scripts/demo_report.py draw docs/demos        pictures of the files there, and their table
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.plugins.plots.plots import figure_of, marks
from engine.train.metrics import read_metrics, series

KEPT = (
    "step",
    "reward/mean",
    "reward/turn/",
    "episode/solved",
    "episodes/count",
    "eval/reward",
    "eval/success",
    "policy/entropy",
    "sampler/diff_",
    "staleness/max",
    "grad_norm",
    "step_seconds",
    "time/",
)
"""Names, and beginnings of names."""

PICTURES: dict[str, tuple[str, dict[str, str], float | None]] = {
    "arithmetic": ("SmolLM2-135M adds: reward of an episode", {"arithmetic": "defaults"}, 0.9),
    "color_square": ("A tiny VLM sees: reward of an episode", {"color_square": "defaults"}, 0.95),
    "credit": (
        "Eight parcels, one a turn: reward of an episode",
        {"credit-turn": "credit by turn", "credit-outcome": "credit by outcome"},
        None,
    ),
}
"""Picture -> its title, its runs and their labels, and where a line is drawn."""
LAST = 5
"""Steps that the reward at the end is the mean of."""


def keep(training: Path, file: Path) -> None:
    """Write a training's metrics, four digits each, without those that nobody draws."""
    found = [path.parent for path in sorted(training.rglob("metrics.jsonl"))]
    if len(found) != 1:
        sys.exit(f"{training} holds {len(found)} trainings; one is needed")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for row in read_metrics(found[0]):
            kept = {name: _round(value) for name, value in row.items() if name.startswith(KEPT)}
            lines.write(json.dumps(kept) + "\n")


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def draw(folder: Path) -> None:
    """Draw every picture whose files are there, and print the table."""
    table = [
        "| run | seed | reward at first | at last | evaluated at first | at last | episodes | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for picture, (title, runs, target) in PICTURES.items():
        files = {label: sorted(folder.glob(f"{name}-[0-9]*.jsonl")) for name, label in runs.items()}
        if not all(files.values()):
            continue
        draw_curves(files, "reward/mean", folder / f"{picture}.png", target, title)
        for name in runs:
            for file in sorted(folder.glob(f"{name}-[0-9]*.jsonl")):
                table.append(_line(name, file))
    sys.stdout.write("\n".join(table) + "\n")


class Curve(NamedTuple):
    """A metric over several runs, by step."""

    steps: list[int]
    """Steps for which every run has a value."""
    mean: list[float]
    low: list[float]
    """Values of the lowest run."""
    high: list[float]
    """Values of the highest run."""


def curve(runs: Sequence[Path], metric: str) -> Curve:
    """Combine one metric of runs that differ in their seed: their `metrics.jsonl`, or the folders that hold one."""
    values = [dict(zip(*series(read_metrics(run), metric), strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, values)))
    if not steps:
        sys.exit(f"no step has {metric!r} in all of these runs: {', '.join(map(str, runs))}")
    columns = [[run[step] for run in values] for step in steps]
    return Curve(steps, [math.fsum(c) / len(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns])


def draw_curves(runs: Mapping[str, Sequence[Path]], metric: str, out: Path, target: float | None, title: str) -> None:
    """Draw one metric of several configurations: the mean over seeds, and a band from the lowest to the highest seed."""
    figure, (axes,) = figure_of(1)
    for label, paths in runs.items():
        combined, seeds = curve(paths, metric), len(paths)
        shown = f"{label} (mean of {seeds}, lowest to highest)" if seeds > 1 else label
        (line,) = axes.plot(combined.steps, combined.mean, label=shown, **marks(len(combined.steps)))
        if seeds > 1:
            axes.fill_between(
                combined.steps, combined.low, combined.high, color=line.get_color(), alpha=0.2, linewidth=0
            )
    if target is not None:
        axes.axhline(target, color="black", linestyle="--", linewidth=1, label=f"{target:g}")
    axes.set_title(title)
    axes.set_ylabel(metric)
    axes.legend(fontsize="small")
    figure.savefig(out, format="png")


def _line(name: str, file: Path) -> str:
    """A training's line of the table."""
    rows = read_metrics(file)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    evaluated = [f"{row['eval/reward']:.2f}" for row in rows if "eval/reward" in row] or ["", ""]
    episodes = sum(row.get("episodes/count", 0) for row in rows)
    minutes = sum(row.get("step_seconds", row.get("time/eval", 0.0)) for row in rows) / 60
    last = sum(rewards[-LAST:]) / len(rewards[-LAST:])
    seed = file.stem.rpartition("-")[2]
    return (
        f"| {name} | {seed} | {rewards[0]:.2f} | {last:.2f} | {evaluated[0]} | {evaluated[-1]} "
        f"| {episodes:.0f} | {minutes:.1f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="a training's metrics that matter here")
    keeping.add_argument("training", type=Path, help="folder that holds one training")
    keeping.add_argument("file", type=Path, help="where to")
    drawing = commands.add_parser("draw", help="pictures and the table")
    drawing.add_argument("folder", type=Path, help="holds the files; pictures go there too")
    options = parser.parse_args()
    if options.command == "keep":
        keep(options.training, options.file)
    else:
        draw(options.folder)
