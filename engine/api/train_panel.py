"""The output of `engine train`: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.api.progress import duration, endings, running, speed, ticking

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters

BARS = "▁▂▃▄▅▆▇█"
_ETA_STEPS = 10
"""Number of the newest steps whose mean duration gives the remaining time."""
WIDTH = 40
"""Maximum number of steps in a curve."""

_GROUPS = (
    ("policy", (("KL", "policy/approx_kl"), ("KL to reference", "policy/kl_ref"), ("entropy", "policy/entropy"),
                ("clipped low", "policy/clip_low"), ("clipped high", "policy/clip_high"), ("ESS", "policy/ess"),
                ("gradient", "grad_norm"), ("lr", "lr"))),
    ("critic", (("loss", "critic/loss"), ("explained variance", "critic/explained_variance"),
                ("mean value", "critic/value_mean"), ("mean return", "critic/return_mean"))),
    ("sampler", (("mean log-prob gap", "sampler/diff_mean"), ("max", "sampler/diff_max"),
                 ("mean staleness", "staleness/mean"), ("max", "staleness/max"))),
)  # fmt: skip


def spark(values: list[float], width: int = WIDTH) -> str:
    """The newest `width` values as bars between their minimum and maximum; a space for a value that is not finite."""
    newest = values[-width:]
    finite = [value for value in newest if math.isfinite(value)]
    if not finite:
        return " " * len(newest)
    low, span = min(finite), max(finite) - min(finite)

    heights = [(value - low) / (span or 1.0) * len(BARS) if math.isfinite(value) else -1 for value in newest]
    return "".join(BARS[min(len(BARS) - 1, int(height))] if height >= 0 else " " for height in heights)


class TrainPanel:
    """The live table; rich renders it at each refresh.

    panel = TrainPanel(steps=100, live=live)
    with shown(panel, console, quiet=False):
        panel.phase("rollout")
        panel.update(1, {"reward/mean": 0.4, "time/rollout": 8.1})
    """

    def __init__(self, steps: int, live: RunCounters | None = None) -> None:
        """
        Args:
            steps: Steps of the training.
            live: Counts of the running episodes; can be set later.
        """
        self.live = live
        self.printer: Console | None = None
        """Console on which each update is printed as a line. None: updates are not printed."""
        self._steps = steps
        self._step = 0
        self._doing = ""
        self._now: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=WIDTH)
        self._losses: deque[float] = deque(maxlen=WIDTH)
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._began = time.perf_counter()

    def phase(self, name: str) -> None:
        """Set the current phase: `rollout`, `update`, `sync`, `eval`, `checkpoint`, `compact`."""
        self._doing = name

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step, by their names in `metrics.jsonl`."""
        self._step = step
        if times := _times(values):
            self._seconds.append(sum(seconds for _, seconds in times))
        self._evaluated |= {name: value for name, value in values.items() if name.startswith("eval/")}
        self._now = dict(values)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        elif "loss" in values:  # a training that samples no episodes
            self._losses.append(values["loss"])
        if self.printer is not None:
            self.printer.print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The newest step on one line, for logs."""
        now = self._now
        parts = [f"step {self._step}/{self._steps}", *([f"{duration(self.eta)} left"] if self.eta is not None else [])]
        for name, key, form in (
            ("reward", "reward/mean", "{:.3f}"),
            ("eval reward", "eval/reward", "{:.3f}"),
            ("loss", "loss", "{:.4g}"),
            ("KL", "policy/approx_kl", "{:.2g}"),
            ("entropy", "policy/entropy", "{:.3f}"),
            ("sampler/trainer log-prob gap", "sampler/diff_mean", "{:.2g}"),
            ("staleness", "staleness/mean", "{:.2g}"),
            ("tokens/s", "tokens_per_second", "{:.0f}"),
        ):
            if key in now:
                parts.append(f"{name} {form.format(now[key])}")
        if again := now.get("rollout/regenerated_tokens"):
            parts.append(f"sampled again {again:.0f}")
        parts += _batch(now)
        if unplaced := now.get("credit/unplaced_rewards"):
            parts.append(f"WARNING: {unplaced:.0f} rewards reach no token")
        times = _times(now)
        if times:
            parts.append(" ".join(f"{phase} {seconds:.1f}s" for phase, seconds in times))
        return " · ".join(parts)

    @property
    def eta(self) -> float | None:
        """Seconds until the last step, from the mean duration of the newest steps; None before the first and after the
        last."""
        left = self._steps - self._step
        return left * sum(self._seconds) / len(self._seconds) if self._seconds and left > 0 else None

    def progress(self) -> str | None:
        """The phase and the running episodes on one line, for logs between two steps; None if nothing is known yet."""
        parts = [f"step {min(self._step + 1, self._steps)}/{self._steps}", *filter(None, [self._doing])]
        if self.live is not None:
            states = " ".join(f"{state}={count}" for state, count in running(self.live))
            parts += [f"{self.live.finished} finished", speed(self.live), *endings(self.live), states or "0 running"]
            parts += filter(None, [self.live.waits])
        return " · ".join(parts) if self._doing or self.live is not None else None

    def __rich__(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(no_wrap=True)
        if self._losses:
            rows.add_row("loss", _curve(self._losses))
            epochs = [value for name, value in self._now.items() if name.endswith("/epoch")]
            if epochs:
                rows.add_row("epoch", f"{epochs[0]:.2f}")
        else:
            rows.add_row("reward", _curve(self._rewards))
        turns = {name[12:]: value for name, value in self._now.items() if name.startswith("reward/turn/")}
        if numbers := sorted(int(turn) for turn in turns if turn.isdigit()):
            rows.add_row("by turn", "  ".join(f"{turn} {turns[str(turn)]:+.3f}" for turn in numbers))
        if self._evaluated:
            rows.add_row("evaluation", _listed(self._evaluated, limit=6))
        for title, entries in _GROUPS:
            parts = [f"{label} {self._now[key]:.3g}" for label, key in entries if key in self._now]
            if parts:
                rows.add_row(title, "  ".join(parts))
        if parts := _batch(self._now):
            rows.add_row("batch", Text("  ".join(parts), style="yellow"))
        if unplaced := self._now.get("credit/unplaced_rewards"):
            words = f"{unplaced:.0f} rewards (sum {self._now['credit/unplaced_sum']:.3g}) reach no token: see the log"
            rows.add_row("warning", Text(words, style="bold red"))
        rows.add_row("episodes", Text(self._episodes(), style="cyan"))
        if times := _times(self._now):
            total = sum(seconds for _, seconds in times)
            shares = (f"{phase} {seconds:.1f} s ({100 * seconds / total:.0f}%)" for phase, seconds in times if total)
            rows.add_row("time", "  ".join(shares))
        return Group(self._head(), rows)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(self._steps, 1), completed=self._step, width=32),
            Text(f"step {self._step}/{self._steps}"),
            Text(self._doing, style="green"),
            Text(
                duration(time.perf_counter() - self._began)
                + (f" · {duration(self.eta)} left" if self.eta is not None else ""),
                style="dim",
            ),
        )
        return head

    def _episodes(self) -> str:
        sampled = self._now.get("tokens_per_second")
        if self.live is None:
            return "–" if sampled is None else f"{sampled:.0f} tokens/s"
        states = [f"{state} {count}" for state, count in running(self.live)]
        shown = self.live.tokens_per_second if sampled is None else sampled
        turns = f"{self.live.turns_per_second:.1f} turns/s"
        waits = [self.live.waits] if self.live.waits else []
        return "  ".join([*(states or ["0 running"]), turns, f"{shown:.0f} tokens/s", *endings(self.live), *waits])


def _curve(values: deque[float]) -> Text:
    """The newest value and the curve of the newest ones."""
    if not values:
        return Text("–", style="dim")
    return Text(f"{values[-1]:.3f}  ").append(spark(list(values)), style="magenta")


@contextmanager
def shown(panel: TrainPanel, console: Console, *, quiet: bool = False) -> Iterator[None]:
    """Show the panel: live on a terminal, one line per step elsewhere, nothing if `quiet`."""
    if quiet:
        yield
        return
    if console.is_terminal:
        from rich.live import Live as LiveDisplay

        with LiveDisplay(panel, console=console, refresh_per_second=4):
            yield
        return
    panel.printer = console
    try:
        with ticking(panel.progress, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)):
            yield
    finally:
        panel.printer = None


def _batch(values: Mapping[str, float]) -> list[str]:
    """What a step says of its batch: how many groups were sampled, if more than it trained on, and why the weights did
    not change."""
    words = []
    used, sampled = values.get("groups/used", 0.0), values.get("groups/sampled", 0.0)
    if used < sampled:
        words.append(f"{used:.0f} of {sampled:.0f} sampled groups have a signal")
    if values.get("updates") == 0:
        words.append("no update: no group has a signal")
    return words


def _times(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name.partition("/")[2], value) for name, value in values.items() if name.startswith("time/")]


def _listed(values: Mapping[str, float], limit: int) -> str:
    parts = [f"{name.partition('/')[2]} {value:.3f}" for name, value in list(values.items())[:limit]]
    return "  ".join([*parts, "…"] if len(values) > limit else parts)
