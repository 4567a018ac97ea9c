"""Plots of a training run as PNG files, drawn by matplotlib without a display.

`panels` selects the metrics of each plot and is a pure function of them. A tracker (`report_to`) shows the same metrics
interactively; these files are for a machine without one, and for docs. matplotlib is in the extra `train` alone, and a training
without it writes no plots. A plotting library on top of matplotlib would not shorten `panels`, which is most of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import EngineError, StoreError, TrainError
from engine.runner.observers import TrainingObserver
from engine.train.metrics import read_metrics, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

    from engine.spec.load import LoadedSpec


PHASES = ("rollout", "update", "sync", "eval", "checkpoint")
"""Parts of a step's time, in the order in which they are stacked; other parts follow."""
_POINTS = 60
"""Lines with fewer points than this have markers."""


class Line(NamedTuple):
    """The values of a metric by step."""

    label: str
    steps: list[int]
    values: list[float]


class Panel(NamedTuple):
    """One plot area."""

    title: str
    lines: list[Line]
    stacked: bool = False
    """The lines are stacked areas."""
    limits: tuple[float, float] | None = None
    """Limits of the vertical axis. Default: from the values."""


def panels(rows: Sequence[Mapping[str, float]]) -> dict[str, list[Panel]]:
    """Select the panels of each plot, by the name of the plot; metrics without values are left out.

    Args:
        rows: The lines of a `metrics.jsonl`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    turns = sorted((name for name in names if name.startswith("reward/turn/")), key=_number)
    named = sorted(name for name in names if name.startswith("reward/") and name not in {*turns, "reward/mean"})
    whole = [*(name for name in ("reward/mean", "episode/solved") if name in names)]
    phases = {name for name in names if name.startswith("time/")}
    first = [f"time/{phase}" for phase in PHASES if f"time/{phase}" in phases]
    drawn = {
        "reward": [
            Panel("mean reward of a batch", _lines(rows, whole)),
            Panel("reward by name", _lines(rows, named)),
            Panel("reward by turn", _lines(rows, turns, lambda name: f"turn {name.rpartition('/')[2]}")),
        ],
        "sft": [
            Panel("cross-entropy per trained token, nats", _lines(rows, ["loss"] if "sft/epoch" in names else [])),
        ],
        "eval": [
            Panel(title, _lines(rows, [name for name in names if name.startswith("eval/") and kind(name)]))
            for title, kind in (("evaluation", _is_rate), ("evaluation: lengths", lambda name: not _is_rate(name)))
        ],
        "policy": [
            Panel("KL", _lines(rows, ["policy/approx_kl", "policy/kl_ref", "policy/token_kl_max"])),
            Panel("fraction of clipped tokens", _lines(rows, ["policy/clip_low", "policy/clip_high"])),
            Panel("entropy per token, nats", _lines(rows, ["policy/entropy"])),
            Panel("probability of sampled tokens", _lines(rows, ["policy/confidence"])),
            Panel("effective sample size, fraction", _lines(rows, ["policy/ess"]), limits=(0.0, 1.05)),
            Panel("gradient norm", _lines(rows, ["grad_norm"])),
        ],
        "critic": [
            Panel("explained variance", _lines(rows, ["critic/explained_variance"])),
            Panel("value loss", _lines(rows, ["critic/loss"])),
            Panel("mean value and mean return", _lines(rows, ["critic/value_mean", "critic/return_mean"])),
            Panel("fraction of clipped values", _lines(rows, ["critic/clip_fraction"])),
            Panel("gradient norm", _lines(rows, ["critic/grad_norm"])),
        ],
        "sampler": [
            Panel("sampler/trainer log-prob difference", _lines(rows, ["sampler/diff_mean", "sampler/diff_max"]))
        ],
        "staleness": [Panel("staleness, weight versions", _lines(rows, ["staleness/mean", "staleness/max"]))],
        "time": [
            Panel("seconds per step, by phase", _stack(rows, [*first, *sorted(phases - set(first))]), stacked=True)
        ],
    }
    kept = {name: [panel for panel in group if panel.lines] for name, group in drawn.items()}
    return {name: group for name, group in kept.items() if group}


def draw(folder: Path) -> list[Path]:
    """Draw the plots of a training into its folder `plots`.

    Args:
        folder: The training's folder, with `metrics.jsonl`.

    Returns:
        The files.

    Raises:
        StoreError: the metrics cannot be read.
        TrainError: kind `train_setup`: matplotlib is not installed.
    """
    pictures = panels(read_metrics(folder))
    made = []
    for name, group in pictures.items():
        figure, axes = _figure(len(group))
        for panel, place in zip(group, axes, strict=True):
            _draw_panel(place, panel)
        made.append(_save(figure, folder / "plots" / f"{name}.png"))
    return made


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
    """Combine one metric of runs that differ in their seed.

    Args:
        runs: Their `metrics.jsonl`, or the folders that hold one.
        metric: The name of the metric.

    Raises:
        StoreError: a file cannot be read, or no step has the metric in every run.
    """
    found = [dict(zip(*series(read_metrics(run), metric), strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        raise StoreError(f"no step has {metric!r} in all of these runs: {', '.join(map(str, runs)) or 'none given'}")
    columns = [[run[step] for run in found] for step in steps]
    return Curve(steps, [math.fsum(c) / len(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns])


def draw_curves(
    runs: Mapping[str, Sequence[Path]],
    metric: str,
    out: Path,
    *,
    target: float | None = None,
    title: str | None = None,
) -> Path:
    """Draw one metric of several configurations: the mean over seeds, and a band from the lowest to the highest seed.

    Args:
        runs: Label -> the `metrics.jsonl` of its runs, one per seed.
        metric: The name of the metric.
        out: The PNG file to write.
        target: Value of a horizontal line.
        title: Title of the plot. Default: the name of the metric.

    Raises:
        StoreError: as in `curve`.
        TrainError: kind `train_setup`: matplotlib is not installed.
    """
    curves = {label: curve(paths, metric) for label, paths in runs.items()}
    figure, (axes,) = _figure(1)
    for label, found in curves.items():
        seeds = len(runs[label])
        shown = f"{label} (mean of {seeds}, lowest to highest)" if seeds > 1 else label
        (line,) = axes.plot(found.steps, found.mean, label=shown, **_marks(len(found.steps)))
        if seeds > 1:
            axes.fill_between(found.steps, found.low, found.high, color=line.get_color(), alpha=0.2, linewidth=0)
    if target is not None:
        axes.axhline(target, color="black", linestyle="--", linewidth=1, label=f"{target:g}")
    axes.set_title(title or metric)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(_whole_steps())
    axes.set_ylabel(metric)
    axes.legend(fontsize="small")
    return _save(figure, out)


def _number(name: str) -> tuple[int, str]:
    tail = name.rpartition("/")[2]
    return (int(tail), "") if tail.isdigit() else (1 << 30, tail)


def _is_rate(name: str) -> bool:
    """Whether the metric is a fraction or a reward; these share an axis."""
    return name not in ("eval/turns", "eval/tokens")


def _lines(
    rows: Sequence[Mapping[str, float]], names: Sequence[str], label: Any = lambda name: name.partition("/")[2] or name
) -> list[Line]:
    found = [Line(label(name), *series(rows, name)) for name in names]
    return [line for line in found if line.steps]


def _stack(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[Line]:
    """Lines over the same steps; a phase that a step does not have counts 0 seconds."""
    measured = {name: dict(zip(*series(rows, name), strict=True)) for name in names}
    steps = sorted({step for found in measured.values() for step in found})
    return [
        Line(name.partition("/")[2], steps, [_finite(found.get(step, 0.0)) for step in steps])
        for name, found in measured.items()
        if found
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainError(
            f"plots need matplotlib ({error}): pip install 'episode-engine[train]'", kind="train_setup"
        ) from error
    columns = min(count, 3)
    rows = -(-count // columns)
    # `Figure` and not pyplot: it needs no display and has no state that threads share.
    figure = Figure(figsize=(5.6 * columns, 3.6 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _whole_steps() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.stacked:
        labels = [line.label for line in panel.lines]
        axes.stackplot(panel.lines[0].steps, *(line.values for line in panel.lines), labels=labels, alpha=0.85)
    else:
        for line in panel.lines:
            axes.plot(line.steps, line.values, label=line.label, **_marks(len(line.steps)))
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(_whole_steps())
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.grid(alpha=0.25)
    if len(panel.lines) <= 12:
        axes.legend(fontsize="small")


def _marks(points: int) -> dict[str, Any]:
    return {"linewidth": 1.5} | ({"marker": "o", "markersize": 3} if points < _POINTS else {})


def _save(figure: Figure, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
    return out


class DrawnTraining(TrainingObserver):
    """Draws the metrics of the training in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = False

    def began(self) -> None:
        """See `TrainingObserver`."""
        self._began = True

    def close(self) -> str | None:
        """Draw. Returns where the plots are."""
        if not self._began:
            return None
        try:
            files = draw(self._folder)
        except EngineError as error:
            return f"plots were not written: {error}"
        return f"Plots: {files[0].parent}" if files else None


def observe(loaded: LoadedSpec, folder: Path) -> DrawnTraining:
    """The hook `observe_training`."""
    return DrawnTraining(folder)
