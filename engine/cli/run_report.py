"""What `engine run` prints at its end: the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.summary import RunSummary

_MESSAGE = 300
"""Number of characters of a failure's message that the summary shows."""


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` in per cent."""
    return f"{100 * part / whole:.0f}%" if whole else "–"


def reasons_in_words(reasons: Mapping[str, int]) -> str:
    """How many rows began for which reason, to follow the number of rows; empty if each episode is one row."""
    return f" ({', '.join(f'{count} {reason}' for reason, count in reasons.items())})" if reasons else ""


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
    for cause, count in summary.causes.counts.most_common():
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
    if unchecked := summary.unchecked_words:
        console.print(unchecked, style="yellow")
    if summary.reply_tokens:
        cost = f", cost {summary.cost:.6g}" if summary.cost else ""
        console.print(f"{summary.reply_tokens} tokens replied as text{cost}")
    if seconds:
        rate = f" · {tokens / seconds:.0f} tokens/s" if tokens else ""
        console.print(f"{seconds:.1f} s{rate}")
