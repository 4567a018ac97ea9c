"""What `engine run` prints: lines of progress, a live panel while episodes run, and the summary at the end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.terminal import echo

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunSummary
    from engine.store.reader import RunReader

T = TypeVar("T")
_CAUSES = 3
"""Maximum number of causes and limits on a line."""
_FIRST, _OFTEN, _SELDOM = 2.0, 5.0, 30.0
_OFTEN_UNTIL = 60.0
_MESSAGE = 300
"""Number of characters of a failure's message that the summary shows."""


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


def running(live: RunCounters) -> list[tuple[str, int]]:
    """The number of running episodes by state."""
    return [(state, count) for state, count in dict(live.states).items() if count > 0]


def endings(live: RunCounters) -> list[str]:
    """Failures by cause, and the share of finished episodes that each limit ended; empty if there are none."""
    # Copies: a thread may call this while the run counts.
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
def ticking(line: Callable[[], str | None], say: Callable[[str], None]) -> Iterator[None]:
    """Say a line of progress from time to time, in a thread, also while other code computes. `line` may return None:
    nothing to say."""
    stop = threading.Event()

    def work() -> None:
        for pause in pauses():
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


async def with_progress(panel: Panel, work: Awaitable[T], console: Console, *, quiet: bool) -> T:
    """Wait for a run, with its panel on a terminal, with a line from time to time elsewhere, or without both
    (`quiet`)."""
    from rich.live import Live as LiveDisplay

    if quiet:
        return await work
    if console.is_terminal:
        with LiveDisplay(panel, console=console, refresh_per_second=4, transient=True):
            return await work
    try:
        with ticking(panel.line, echo):
            return await work
    finally:
        echo(panel.line())


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` in per cent."""
    return f"{100 * part / whole:.0f}%" if whole else "–"


def unchecked_warning(count: int) -> str:
    """What is not known about prompts that a server did not report."""
    return (
        f"prompts unchecked: {count:,}. The server did not report them, so nothing shows that it computed on the ids "
        "of the rows"
    )


def dropped_words(store: RunReader) -> str:
    """How many episodes have no content left; empty if none was dropped."""
    dropped = store.dropped()
    return dropped.words(len(store.statuses())) if dropped.episodes else ""


def reasons_in_words(reasons: Mapping[str, int]) -> str:
    """How many rows began for which reason, to follow the number of rows; empty if each episode is one row."""
    return f" ({', '.join(f'{count} {reason}' for reason, count in reasons.items())})" if reasons else ""


class Panel:
    """The live panel; rich renders it at each refresh."""

    def __init__(self, live: RunCounters, summary: RunSummary) -> None:
        self._live = live
        self._summary = summary

    def line(self) -> str:
        """Return the panel's main numbers on one line, for logs."""
        live, summary = self._live, self._summary
        states = " ".join(f"{state}={count}" for state, count in running(live))
        parts = [f"{summary.episodes}/{live.total} episodes", speed(live)]
        if live.eta is not None:
            parts.append(f"{duration(live.eta)} left")
        if summary.episodes:
            parts.append(f"mean reward {summary.mean_reward:.3f}")
        parts += [*endings(live), states or "0 running", *self._warnings()]
        return " · ".join(parts)

    def __rich__(self) -> Group:
        live, summary = self._live, self._summary
        head = Table.grid(padding=(0, 2))
        left = f" · {duration(live.eta)} left" if live.eta is not None else ""
        head.add_row(
            ProgressBar(total=max(live.total, 1), completed=summary.episodes, width=32),
            Text(f"{summary.episodes}/{live.total} episodes"),
            Text(f"mean reward {summary.mean_reward:.3f}" if summary.episodes else ""),
            Text(f"{duration(live.seconds)}{left}", style="dim"),
        )
        states = Text("  ".join(f"{state} {count}" for state, count in running(live)), style="cyan")
        more = [Text(line, style="yellow") for line in (*endings(live), *self._warnings())]
        return Group(head, Text(speed(live)), states, *more)

    def _warnings(self) -> list[str]:
        unchecked = self._summary.unchecked_prompts
        return [
            *([self._live.waits] if self._live.waits else []),
            *([f"prompts unchecked: {unchecked:,}"] if unchecked else []),
        ]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def sources_table(summary: RunSummary) -> Table:
    """Episodes, mean reward and part of solved episodes of each source of a mix of tasks."""
    rows = []
    for name, sums in summary.sources.items():
        mean = f"{sums.reward / sums.episodes:+.3f}" if sums.episodes else "–"
        part, solved = share(sums.episodes, summary.episodes), share(sums.solved, sums.episodes)
        rows.append((name, str(sums.episodes), part, mean, solved))
    return _table("Sources of the tasks", ("source", "episodes", "share", "mean reward", "solved"), rows)


def _tables(summary: RunSummary) -> Iterator[Table]:
    """The tables of a summary."""
    outcomes = [(name, str(count), share(count, summary.episodes)) for name, count in summary.outcomes.most_common()]
    yield _table("Outcomes", ("outcome", "episodes", "share"), outcomes)
    yield sources_table(summary)
    causes = []
    for cause, count in summary.causes.most_common():
        line = " ".join(summary.causes.first[cause].message.split())
        causes.append((str(count), str(cause), line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"))
    yield _table("Failures by cause", ("episodes", "cause", "message of the first one"), causes)
    turns = [
        (str(index), f"{reached:.0f}", f"{total / reached:+.3f}" if reached else "–")
        for index, (total, reached) in enumerate(summary.turn_rewards)
    ]
    yield _table("Rewards by turn", ("turn", "episodes", "mean reward"), turns)
    transitions = [(*edge, str(count)) for edge, count in summary.transitions.most_common()]
    yield _table("Transitions", ("from", "event", "to", "taken"), transitions)
    total = sum(summary.seconds.values())
    times = [
        (state, f"{seconds:.1f}", share(seconds, total))
        for state, seconds in sorted(summary.seconds.items(), key=lambda item: -item[1])
    ]
    table = _table("Time by state (summed over episodes)", ("state", "seconds", "share"), times)
    if queued := summary.queue_seconds:
        table.add_row("  waiting in the backend", f"{queued:.1f}", share(queued, total), style="dim")
    yield table


def print_summary(
    console: Console, summary: RunSummary, *, seconds: float | None = None, tokens: int | None = None
) -> None:
    """Print the summary of a run.

    Args:
        console: The console to print on.
        summary: The summary of finished episodes.
        seconds: Wall time of this process's part of the run.
        tokens: Number of tokens that were sampled in it.
    """
    for table in _tables(summary):
        if table.row_count:
            console.print(table)
    names = ", ".join(f"{name} {value / summary.episodes:+.3f}" for name, value in sorted(summary.names.items()))
    counts = summary.counts
    console.print(
        f"{summary.episodes} episodes · {summary.branches} rows{reasons_in_words(summary.branch_reasons)} · "
        f"{summary.trainable} trainable · "
        f"mean reward {summary.mean_reward:.3f}" + (f" ({names})" if len(summary.names) > 1 else "")
    )
    console.print(
        f"{counts['sampled_tokens']} tokens sampled · {summary.prompt_tokens} prompt tokens, "
        f"{share(summary.cached_tokens, summary.prompt_tokens)} from cache · {counts['tool_calls']} tool calls, "
        f"{counts['tool_errors']} failed · {counts['user_turns']} user turns"
    )
    if lost := counts["unreceived_replies"]:
        console.print(f"{lost} replies that no agent program received; they are not trained", style="yellow")
    if summary.unchecked_prompts:
        console.print(unchecked_warning(summary.unchecked_prompts), style="yellow")
    if summary.reply_tokens:
        cost = f", cost {summary.cost:.6g}" if summary.cost else ""
        console.print(f"{summary.reply_tokens} tokens replied as text{cost}")
    if seconds:
        rate = f" · {tokens / seconds:.0f} tokens/s" if tokens else ""
        console.print(f"{seconds:.1f} s{rate}")
