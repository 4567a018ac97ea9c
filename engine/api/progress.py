"""What is shown while a run or a training goes on: a live panel on a terminal and in a notebook, a line from time to
time elsewhere, or nothing.

    run = engine.run(spec)                              # on stderr
    run = engine.run(spec, progress=False)              # nothing
    run = engine.run(spec, progress=Mine())             # a `Progress` of one's own

Invariant: what shows progress changes nothing that a run does or stores.
"""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.console import SafeConsole, make_console

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunSummary

_CAUSES = 3
"""Maximum number of causes and limits on a line."""
_FIRST, _OFTEN, _SELDOM = 2.0, 5.0, 30.0
_OFTEN_UNTIL = 60.0
_NOTEBOOK_LINES, _NOTEBOOK_PAUSE = 20, 0.5
"""Number of lines that a notebook shows above the panel, and the seconds between two updates of the panel."""


class Panel(Protocol):
    """The newest numbers of something that goes on. Both methods may be called in another thread."""

    def line(self) -> str | None:
        """The main numbers on one line, for logs; None: there is nothing to say yet."""

    def __rich__(self) -> RenderableType:
        """The panel on a terminal or in a notebook, which rich renders at each refresh."""


class Progress(Protocol):
    """Shows how a run, a training or an evaluation goes on."""

    def say(self, text: str) -> None:
        """Show a line about a step, such as that the backend is ready."""

    def warn(self, text: str) -> None:
        """Show a line about something that may be wrong, such as a warning about the spec."""

    def step(self, text: str) -> None:
        """Show a line about a finished part of what is watched, such as a step of a training."""

    def watching(self, panel: Panel) -> AbstractContextManager[None]:
        """Show a panel while the block runs."""


class ConsoleProgress:
    """Progress on a console: a live panel on a terminal, lines elsewhere.

    Args:
        console: Where to print; by default stderr.
        quiet: Show no panel.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or make_console(stderr=True)
        self._quiet = quiet

    def say(self, text: str) -> None:
        """See `Progress`."""
        self.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """See `Progress`."""
        self.console.print(text, style="yellow", markup=False, highlight=False)

    def step(self, text: str) -> None:
        """See `Progress`."""
        if not self._quiet:
            self._print_line(text)

    @contextmanager
    def watching(self, panel: Panel) -> Iterator[None]:
        """See `Progress`."""
        from rich.live import Live

        if self._quiet:
            yield
        elif self.console.is_terminal:
            with Live(panel, console=self.console, refresh_per_second=4, transient=True):
                yield
        else:
            with ticking(panel.line, self._print_line):
                yield
            if (line := panel.line()) is not None:
                self._print_line(line)

    def _print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class NotebookProgress:
    """Progress below a cell of a notebook: one output, which shows the newest lines and the panel."""

    def __init__(self) -> None:
        self._lines: deque[Text] = deque(maxlen=_NOTEBOOK_LINES)
        self._panel: Panel | None = None
        self._handle: Any = None

    def say(self, text: str) -> None:
        """See `Progress`."""
        self._add(Text(text))

    def warn(self, text: str) -> None:
        """See `Progress`."""
        self._add(Text(text, style="dark_orange"))

    step = say

    @contextmanager
    def watching(self, panel: Panel) -> Iterator[None]:
        """See `Progress`."""
        self._panel = panel
        try:
            with ticking(lambda: "", lambda _: self._show(), repeat(_NOTEBOOK_PAUSE)):
                yield
        finally:
            self._panel = None
            self._show()

    def _add(self, line: Text) -> None:
        self._lines.append(line)
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        panel = self._panel
        console = SafeConsole(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        console.print(*self._lines, *([panel] if panel is not None else []), sep="\n")
        text = console.export_text(clear=False)
        html = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        data = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


def progress_of(progress: Progress | bool) -> Progress:
    """The progress that an argument asks for: True is the default one, False shows nothing."""
    if not isinstance(progress, bool):
        return progress
    if not progress:
        return ConsoleProgress(Console(quiet=True), quiet=True)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return ConsoleProgress() if getattr(shell, "kernel", None) is None else NotebookProgress()


def duration(seconds: float) -> str:
    """A duration with its two largest units: `45 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`."""
    rounded = max(0, round(seconds))
    for unit, size, lower, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if rounded >= size:
            rest = rounded % size // part
            return f"{rounded // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{rounded} s"


def speed(live: RunCounters) -> str:
    """Turns so far, turns and tokens a second."""
    return f"{live.turns} turns · {live.turns_per_second:.1f} turns/s · {live.tokens_per_second:.0f} tokens/s"


def running(live: RunCounters, sign: str = " ") -> list[str]:
    """The number of running episodes by state, with a sign between the two."""
    return [f"{state}{sign}{count}" for state, count in dict(live.states).items() if count > 0]


def endings(live: RunCounters) -> list[str]:
    """Failures by cause, and the share of finished episodes that each limit ended; empty if there are none."""
    # copies: a thread may call this while the run counts.
    failures, limits = Counter(dict(live.failures)), Counter(dict(live.limits))
    parts = []
    if failures:
        counted = [f"{cause} {count}" for cause, count in failures.most_common()]
        parts.append(f"{failures.total()} failed: {_first_of(counted)}")
    if limits:
        shares = [f"{limit} {100 * count / max(live.finished, 1):.0f}%" for limit, count in limits.most_common()]
        parts.append(f"ended by limits: {_first_of(shares)}")
    return parts


def _first_of(parts: list[str]) -> str:
    return ", ".join([*parts[:_CAUSES], *(["…"] if len(parts) > _CAUSES else [])])


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each line of progress in a log: the first soon, many in the first minute, then
    few."""
    yield _FIRST
    waited = _FIRST
    while True:
        pause = _OFTEN if waited < _OFTEN_UNTIL else _SELDOM
        waited += pause
        yield pause


@contextmanager
def ticking(
    line: Callable[[], str | None], say: Callable[[str], None], after: Iterable[float] | None = None
) -> Iterator[None]:
    """Say a line of progress from time to time, in a thread, also while other code computes. `line` may return None:
    nothing to say. `after`: the seconds before each line."""
    stop = threading.Event()

    def work() -> None:
        for pause in after or pauses():
            if stop.wait(pause):
                return
            if (words := line()) is not None:
                say(words)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=1.0)


@dataclass(eq=False)
class RunPanel:
    """The panel of a run."""

    live: RunCounters
    summary: RunSummary
    more: Callable[[], list[str]] = list
    """Lines below it."""

    def line(self) -> str:
        """Return the panel's main numbers on one line, for logs."""
        live, summary = self.live, self.summary
        parts = [f"{summary.episodes}/{live.total} episodes", speed(live)]
        if live.eta is not None:
            parts.append(f"{duration(live.eta)} left")
        if summary.episodes:
            parts.append(f"mean reward {summary.mean_reward:.3f}")
        parts += [*endings(live), " ".join(running(live, "=")) or "0 running", *self._warnings(), *self.more()]
        return " · ".join(parts)

    def __rich__(self) -> Group:
        live, summary = self.live, self.summary
        head = Table.grid(padding=(0, 2))
        left = f" · {duration(live.eta)} left" if live.eta is not None else ""
        head.add_row(
            ProgressBar(total=max(live.total, 1), completed=summary.episodes, width=32),
            Text(f"{summary.episodes}/{live.total} episodes"),
            Text(f"mean reward {summary.mean_reward:.3f}" if summary.episodes else ""),
            Text(f"{duration(live.seconds)}{left}", style="dim"),
        )
        more = [Text(line, style="yellow") for line in (*endings(live), *self._warnings())]
        return Group(head, Text(speed(live)), Text("  ".join(running(live)), style="cyan"), *more, *self.more())

    def _warnings(self) -> list[str]:
        unchecked = self.summary.unchecked_prompts
        return [*filter(None, [self.live.waits, f"prompts unchecked: {unchecked:,}" if unchecked else ""])]


BARS = "▁▂▃▄▅▆▇█"
_STEP_COLUMNS = 80
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
            if part and len(line) + len(part) + 3 <= _STEP_COLUMNS:
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
            parts += [f"{self.live.finished} finished", speed(self.live), *endings(self.live)]
            parts += filter(None, [" ".join(running(self.live, "=")) or "0 running", self.live.waits])
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
            shown = [f"{name.partition('/')[2]} {value:.3f}" for name, value in [*self._evaluated.items()][:6]]
            rows.add_row("evaluation", "  ".join([*shown, "…"] if len(self._evaluated) > 6 else shown))
        for title, entries in _GROUPS:
            parts = [f"{label} {self._now[key]:.3g}" for label, key in entries if key in self._now]
            if parts:
                rows.add_row(title, "  ".join(parts))
        if parts := _batch(self._now):
            rows.add_row("batch", "  ".join(parts))
        if unplaced := self._now.get("credit/unplaced_rewards"):
            words = f"{unplaced:.0f} rewards (sum {self._now['credit/unplaced_sum']:.3g}) reach no token: see the log"
            rows.add_row("warning", Text(words, style="bold red"))
        sampled = self._now.get("tokens_per_second")
        episodes = "–" if sampled is None else f"{sampled:.0f} tokens/s"
        if (live := self.live) is not None:
            tokens = f"{live.tokens_per_second if sampled is None else sampled:.0f} tokens/s"
            a_second = [f"{live.turns_per_second:.1f} turns/s", tokens]
            parts = [*(running(live) or ["0 running"]), *a_second, *endings(live), live.waits or ""]
            episodes = "  ".join(filter(None, parts))
        rows.add_row("episodes", Text(episodes, style="cyan"))
        if times := _times(self._now):
            total = sum(seconds for _, seconds in times)
            shares = (f"{phase} {seconds:.1f} s ({100 * seconds / total:.0f}%)" for phase, seconds in times if total)
            rows.add_row("time", "  ".join(shares))
        left = "" if self.eta is None else f" · {duration(self.eta)} left"
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(self._steps, 1), completed=self._step, width=32),
            Text(f"step {self._step}/{self._steps}"),
            Text(self._doing, style="green"),
            Text(f"{duration(time.perf_counter() - self._began)}{left}", style="dim"),
        )
        return Group(head, rows)


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
