"""The output of `engine run`: a live panel while episodes run, and the summary at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from engine.runner.stats import Live, Summary


_MESSAGE = 300
"""Number of characters of a failure's message that the summary shows."""


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` in per cent."""
    return f"{100 * part / whole:.0f}%" if whole else "–"


class Panel:
    """The live panel; rich renders it at each refresh."""

    def __init__(self, live: Live, summary: Summary) -> None:
        self._live = live
        self._summary = summary
        self._began = time.perf_counter()

    def line(self) -> str:
        """Return the panel's main numbers on one line, for logs."""
        live, summary = self._live, self._summary
        states = " ".join(f"{state}={count}" for state, count in live.states.items() if count > 0)
        return (
            f"{summary.episodes}/{live.total} episodes · {live.tokens_per_second:.0f} tokens/s · "
            f"mean reward {summary.mean_reward:.3f} · {states or '0 running'}"
            + (f" · {live.waits}" if live.waits else "")
        )

    def __rich__(self) -> Group:
        live, summary = self._live, self._summary
        head = Table.grid(padding=(0, 2))
        seconds = time.perf_counter() - self._began
        head.add_row(
            ProgressBar(total=max(live.total, 1), completed=summary.episodes, width=32),
            Text(f"{summary.episodes}/{live.total} episodes"),
            Text(f"{live.tokens_per_second:.0f} tokens/s"),
            Text(f"mean reward {summary.mean_reward:.3f}"),
            Text(f"{seconds:.0f} s", style="dim"),
        )
        states = Text("  ".join(f"{state} {count}" for state, count in live.states.items() if count > 0), style="cyan")
        waits = live.waits
        return Group(head, states, *([Text(waits, style="yellow")] if waits else []))


def _outcomes(summary: Summary) -> Table:
    table = Table("outcome", "episodes", "share", title="Outcomes", title_justify="left")
    for name, count in summary.outcomes.most_common():
        table.add_row(name, str(count), share(count, summary.episodes))
    return table


def _causes(summary: Summary) -> Table:
    table = Table("episodes", "cause", "message of the first one", title="Failures by cause", title_justify="left")
    for cause, count in summary.causes.most_common():
        message = summary.causes.first[cause].message
        line = " ".join(message.split())
        table.add_row(str(count), str(cause), line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…")
    return table


def _turns(summary: Summary) -> Table:
    table = Table("turn", "episodes", "mean reward", title="Rewards by turn", title_justify="left")
    for index, (total, reached) in enumerate(summary.turn_rewards):
        table.add_row(str(index), f"{reached:.0f}", f"{total / reached:+.3f}" if reached else "–")
    return table


def _transitions(summary: Summary) -> Table:
    table = Table("from", "event", "to", "taken", title="Transitions", title_justify="left")
    for (source, event, dest), count in summary.transitions.most_common():
        table.add_row(source, event, dest, str(count))
    return table


def sources_table(summary: Summary) -> Table:
    """Episodes, mean reward and part of solved episodes of each source of a mix of tasks."""
    table = Table(
        "source", "episodes", "share", "mean reward", "solved", title="Sources of the tasks", title_justify="left"
    )
    for name, sums in summary.sources.items():
        mean = f"{sums.reward / sums.episodes:+.3f}" if sums.episodes else "–"
        table.add_row(
            name, str(sums.episodes), share(sums.episodes, summary.episodes), mean, share(sums.solved, sums.episodes)
        )
    return table


def _times(summary: Summary) -> Table:
    table = Table("state", "seconds", "share", title="Time by state (summed over episodes)", title_justify="left")
    whole = sum(summary.seconds.values())
    for state, seconds in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        table.add_row(state, f"{seconds:.1f}", share(seconds, whole))
    if summary.queue_seconds:
        table.add_row(
            "  waiting in the backend", f"{summary.queue_seconds:.1f}", share(summary.queue_seconds, whole), style="dim"
        )
    return table


def print_summary(
    console: Console, summary: Summary, *, seconds: float | None = None, tokens: int | None = None
) -> None:
    """Print the summary of a run.

    Args:
        console: The console to print on.
        summary: The summary of finished episodes.
        seconds: Wall time of this process's part of the run.
        tokens: Number of tokens that were sampled in it.
    """
    tables = (
        _outcomes(summary),
        sources_table(summary),
        _causes(summary),
        _turns(summary),
        _transitions(summary),
        _times(summary),
    )
    for table in tables:
        if table.row_count:
            console.print(table)
    names = ", ".join(f"{name} {value / summary.episodes:+.3f}" for name, value in sorted(summary.names.items()))
    counts = summary.counts
    console.print(
        f"{summary.episodes} episodes · {summary.branches} rows · {summary.trainable} trainable · "
        f"mean reward {summary.mean_reward:.3f}" + (f" ({names})" if len(summary.names) > 1 else "")
    )
    console.print(
        f"{counts['sampled_tokens']} tokens sampled · {summary.prompt_tokens} prompt tokens, "
        f"{share(summary.cached_tokens, summary.prompt_tokens)} from cache · {counts['tool_calls']} tool calls, "
        f"{counts['tool_errors']} failed · {counts['user_turns']} user turns"
    )
    if summary.reply_tokens:
        cost = f", cost {summary.cost:.6g}" if summary.cost else ""
        console.print(f"{summary.reply_tokens} tokens replied as text{cost}")
    if seconds:
        rate = f" · {tokens / seconds:.0f} tokens/s" if tokens else ""
        console.print(f"{seconds:.1f} s{rate}")
