"""Plots of a training as PNG files in its folder `plots`, drawn by matplotlib without a display when it ends, also by
an error.

`panels` selects the metrics of each plot and is a pure function of them. A tracker (`report_to`) shows the same metrics
interactively; these files are for a machine without one, and for docs. matplotlib is in the extra `train` alone: a plot
that cannot be drawn is named and does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import EngineError, TrainError
from engine.runner.observers import TrainingObserver
from engine.train.metrics import read_metrics, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from engine.spec.load import LoadedSpec

PHASES = ("rollout", "update", "sync", "eval", "checkpoint")
"""Parts of a step's time, in the order in which they are stacked; other parts follow."""
_PLOTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "policy": {
        "KL": ("policy/approx_kl", "policy/kl_ref", "policy/token_kl_max"),
        "fraction of clipped tokens": ("policy/clip_low", "policy/clip_high"),
        "entropy per token, nats": ("policy/entropy",),
        "probability of sampled tokens": ("policy/confidence",),
        "effective sample size, fraction": ("policy/ess",),
        "gradient norm": ("grad_norm",),
    },
    "critic": {
        "explained variance": ("critic/explained_variance",),
        "value loss": ("critic/loss",),
        "mean value and mean return": ("critic/value_mean", "critic/return_mean"),
        "fraction of clipped values": ("critic/clip_fraction",),
        "gradient norm": ("critic/grad_norm",),
    },
    "sampler": {"sampler/trainer log-prob difference": ("sampler/diff_mean", "sampler/diff_max")},
    "staleness": {"staleness, weight versions": ("staleness/mean", "staleness/max")},
}
"""The metrics of each panel of the plots that do not depend on the names that a training has."""
_LIMITS = {"effective sample size, fraction": (0.0, 1.05)}
"""Limits of the vertical axis. Default: from the values."""
_LENGTHS = frozenset({"eval/turns", "eval/tokens"})
"""Measures of an evaluation that share no axis with the others, which are fractions and rewards."""
_POINTS = 60
"""Lines with fewer points than this have markers."""


class MetricLine(NamedTuple):
    """The values of a metric by step."""

    label: str
    steps: list[int]
    values: list[float]


class PlotPanel(NamedTuple):
    """One plot area."""

    title: str
    lines: list[MetricLine]
    stacked: bool = False
    """The lines are stacked areas."""


def panels(rows: Sequence[Mapping[str, float]]) -> dict[str, list[PlotPanel]]:
    """Select the panels of each plot, by the name of the plot; metrics without values are left out.

    Args:
        rows: The lines of a `metrics.jsonl`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    turns = sorted((name for name in names if name.startswith("reward/turn/")), key=_turn)
    parts = sorted(name for name in names if name.startswith("reward/") and name not in {*turns, "reward/mean"})
    totals = [name for name in ("reward/mean", "episode/solved") if name in names]
    measures = [name for name in names if name.startswith("eval/")]
    drawn = {
        "reward": [
            PlotPanel("mean reward of a batch", _lines(rows, totals)),
            PlotPanel("reward by name", _lines(rows, parts)),
            PlotPanel(
                "reward by turn", [line._replace(label=f"turn {line.label[5:]}") for line in _lines(rows, turns)]
            ),
        ],
        "sft": [
            PlotPanel("cross-entropy per trained token, nats", _lines(rows, ["loss"] if "sft/epoch" in names else [])),
        ],
        "eval": [
            PlotPanel("evaluation", _lines(rows, [name for name in measures if name not in _LENGTHS])),
            PlotPanel("evaluation: lengths", _lines(rows, [name for name in measures if name in _LENGTHS])),
        ],
        **{
            plot: [PlotPanel(title, _lines(rows, metrics)) for title, metrics in group.items()]
            for plot, group in _PLOTS.items()
        },
        "time": [PlotPanel("seconds per step, by phase", _phases(rows, names), stacked=True)],
    }
    filled = {plot: [panel for panel in group if panel.lines] for plot, group in drawn.items()}
    return {plot: group for plot, group in filled.items() if group}


def _turn(name: str) -> tuple[int, str]:
    """Sorts metrics of turns by the number of the turn; other names come last."""
    tail = name.rpartition("/")[2]
    return (int(tail), "") if tail.isdigit() else (1 << 30, tail)


def _lines(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[MetricLine]:
    lines = [MetricLine(name.partition("/")[2] or name, *series(rows, name)) for name in names]
    return [line for line in lines if line.steps]


def _phases(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[MetricLine]:
    """Lines over the same steps; a phase that a step does not have, or whose time is not finite, counts 0 seconds."""
    first = [f"time/{phase}" for phase in PHASES]
    others = sorted(name for name in names if name.startswith("time/") and name not in first)
    measured = {name: dict(zip(*series(rows, name), strict=True)) for name in [*first, *others]}
    steps = sorted({step for seconds in measured.values() for step in seconds})
    lines = []
    for name, seconds in measured.items():
        values = [seconds.get(step, 0.0) for step in steps]
        if seconds:
            lines.append(MetricLine(name[5:], steps, [value if math.isfinite(value) else 0.0 for value in values]))
    return lines


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
    files = []
    for name, group in panels(read_metrics(folder)).items():
        figure, axes = figure_of(len(group))
        for panel, place in zip(group, axes, strict=True):
            _draw_panel(place, panel)
        files.append(folder / "plots" / f"{name}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(files[-1], format="png")
    return files


def figure_of(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with a number of plot areas, whose horizontal axes are steps.

    Raises:
        TrainError: kind `train_setup`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
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
    for place in axes[:count]:
        place.set_xlabel("step")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes[:count]


def _draw_panel(axes: Axes, panel: PlotPanel) -> None:
    if panel.stacked:
        labels = [line.label for line in panel.lines]
        axes.stackplot(panel.lines[0].steps, *(line.values for line in panel.lines), labels=labels, alpha=0.85)
    else:
        for line in panel.lines:
            axes.plot(line.steps, line.values, label=line.label, **marks(len(line.steps)))
    axes.set_title(panel.title, fontsize="medium")
    if panel.title in _LIMITS:
        axes.set_ylim(*_LIMITS[panel.title])
    axes.grid(alpha=0.25)
    if len(panel.lines) <= 12:
        axes.legend(fontsize="small")


def marks(points: int) -> dict[str, Any]:
    """The style of a line."""
    return {"linewidth": 1.5} | ({"marker": "o", "markersize": 3} if points < _POINTS else {})


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
