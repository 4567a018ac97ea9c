"""What is shown of a training: a live table, and a line for each step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.api.progress import duration, endings, running, speed

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters

BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 80
"""Maximum length of the line of a step."""
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
    """The live table, a `Panel`.

    panel = TrainPanel(steps=100)
    with progress.watching(panel):
        panel.phase("rollout")
        panel.update(1, {"reward/mean": 0.4, "time/rollout": 8.1})
        progress.step(panel.step_line())
    """

    def __init__(self, steps: int, live: RunCounters | None = None) -> None:
        """
        Args:
            steps: Steps of the training.
            live: Counts of the running episodes; can be set later.
        """
        self.live = live
        self._steps = steps
        self._step = 0
        self._doing = "loading"
        self._now: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=WIDTH)
        self._losses: deque[float] = deque(maxlen=WIDTH)
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._ended = (0, 0)
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
        if self.live is not None:  # the replies of the episodes that ended since the step before
            ended = self.live.cut, self.live.finished_turns
            cut, turns = (now - before for now, before in zip(ended, self._ended, strict=True))
            self._ended, self._now["cut"] = ended, cut / max(turns, 1)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        elif "loss" in values:  # a training that samples no episodes
            self._losses.append(values["loss"])

    def step_line(self) -> str:
        """The newest step on one line that fits a terminal: what does not fit is left out."""
        now = self._now
        left = None if self.eta is None else " ".join(duration(self.eta).split()[:2])
        unplaced = now.get("credit/unplaced_rewards")
        line = f"step {self._step}/{self._steps}"
        for part in (
            f"WARNING: {unplaced:.0f} rewards reach no token" if unplaced else None,
            _number("reward", now, "reward/mean") or _number("loss", now, "loss", ".4g"),
            *_batch(now),
            _number("eval", now, "eval/reward"),
            f"{left} left" if left else None,
            _number("KL", now, "policy/approx_kl", ".2g"),
            _number("tokens/s", now, "tokens_per_second", ".0f"),
        ):
            if part and len(line) + len(part) + 3 <= _COLUMNS:
                line += f" · {part}"
        return line

    @property
    def eta(self) -> float | None:
        """Seconds until the last step, from the mean duration of the newest steps; None before the first and after the
        last."""
        left = self._steps - self._step
        return left * sum(self._seconds) / len(self._seconds) if self._seconds and left > 0 else None

    def line(self) -> str | None:
        """The phase and the running episodes on one line, for logs between two steps; None after the last one."""
        if self._step >= self._steps:
            return None
        parts = [f"step {self._step + 1}/{self._steps}", self._doing]
        if self.live is not None:
            states = " ".join(f"{state}={count}" for state, count in running(self.live))
            parts += [f"{self.live.finished} finished", speed(self.live), *endings(self.live), states or "0 running"]
            parts += filter(None, [self.live.waits])
        return " · ".join(parts)

    def __rich__(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
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
            rows.add_row("batch", "  ".join(parts))
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


def _number(label: str, values: Mapping[str, float], name: str, form: str = ".3f") -> str | None:
    return f"{label} {values[name]:{form}}" if name in values else None


def _batch(values: Mapping[str, float]) -> list[str]:
    """What a step says of its batch: success, groups without a signal, cut replies, and that no weight changed."""
    words = []
    if "episode/solved" in values:
        words.append(f"solved {values['episode/solved']:.0%}")
    if equal := values.get("groups/equal"):
        words.append(f"no signal {equal:.0f}/{values['groups/sampled']:.0f}")
    if (cut := values.get("cut", 0.0)) >= 0.005:
        words.append(f"cut {cut:.0%}")
    if values.get("updates") == 0:
        words.append("no update")
    return words


def _times(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name.partition("/")[2], value) for name, value in values.items() if name.startswith("time/")]


def _listed(values: Mapping[str, float], limit: int) -> str:
    parts = [f"{name.partition('/')[2]} {value:.3f}" for name, value in list(values.items())[:limit]]
    return "  ".join([*parts, "…"] if len(values) > limit else parts)
