"""The charts over a list of episodes: bars, each with the expression that chooses its episodes.

Invariant: all charts but one are computed by SQL over all episodes of the list; time by state is the mean of at most
`SAMPLED` finished ones, because only their results hold it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from engine.plugins.show.listing.rows import MADE

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing

BINS = 16
"""Maximum number of bars of a chart."""
SAMPLED = 200
_ENDED_BY_ITSELF = 'outcome.failure == "" && outcome.limit == ""'


def charts_of(listing: Listing, filter: str, text: str) -> list[dict[str, Any]]:
    """Return the charts of the episodes that a filter and a text choose. Each bar has `label`, `value`, `text`, `tone`
    and `filter`.

    Raises:
        StoreError: the filter is not valid.
    """
    chosen = (filter, text)
    done = listing.totals(*chosen).done
    drawn = [
        ("reward", "Reward", "columns", _spread(listing, chosen, "reward", "outcome.reward", float)),
        ("outcome", "Outcomes", "rows", _outcomes(listing, chosen, done)),
        ("turn", "Solved by turn", "columns", _turns(listing, chosen, done)),
        ("task", "Success by task, lowest first", "rows", _tasks(listing, chosen)),
        ("length", "Sampled tokens", "columns", _spread(listing, chosen, MADE["sampled"], "tokens.sampled", int)),
        ("state", "Mean time by state", "rows", _states(listing, chosen)),
    ]
    return [{"name": name, "title": title, "kind": kind, "bars": bars} for name, title, kind, bars in drawn if bars]


def _bar(label: str, value: float, text: str, filter: str, tone: str = "none") -> dict[str, Any]:
    return {"label": label, "value": value, "text": text, "tone": tone, "filter": filter}


def _text(value: str) -> str:
    """A text in CEL."""
    return json.dumps(value, ensure_ascii=False)


def _episodes(count: int) -> str:
    return f"{count:,} episode{'s' * (count != 1)}"


def _spread(
    listing: Listing, chosen: tuple[str, str], column: str, name: str, kind: type[int] | type[float]
) -> list[dict[str, Any]]:
    """How many episodes have which value; a bar's expression names the smallest and the largest value in it."""
    known = f"AND e.status = 'done' AND abs({column}) < 1e300"
    ends = [
        row for row in listing.query(f"SELECT min({column}), max({column}) {{}} {known}", *chosen) if row[0] is not None
    ]
    if not ends:
        return []
    low, high = min(row[0] for row in ends), max(row[1] for row in ends)
    step = max(1, math.ceil((high - low + 1) / BINS)) if kind is int else (high - low) / BINS or 1.0
    query = (
        f"SELECT min({BINS - 1}, CAST(({column} - :bar_low) / :bar_width AS INTEGER)) AS bin, count(*), min({column}), "
        f"max({column}) {{}} {known} GROUP BY bin"
    )
    bins: dict[int, tuple[int, Any, Any]] = {}
    for bin, count, least, most in listing.query(query, *chosen, bar_low=low, bar_width=step):
        before = bins.get(bin, (0, least, most))
        bins[bin] = (before[0] + count, min(before[1], least), max(before[2], most))
    bars = []
    for bin in range(max(bins) + 1):
        count, least, most = bins.get(bin, (0, kind(low + bin * step), kind(low + bin * step)))
        label = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        condition = (
            f"{name} == {kind(least)!r}" if least == most else f"{name} >= {kind(least)!r} && {name} <= {kind(most)!r}"
        )
        tone = "none" if kind is int else "good" if least > 0 else "bad" if most < 0 else "none"
        bars.append(_bar(label, count, _episodes(count), condition, tone))
    return bars


def _outcomes(listing: Listing, chosen: tuple[str, str], done: int) -> list[dict[str, Any]]:
    """How episodes ended: failures and limits by cause, solved, and the events of the others."""
    query = (
        "SELECT solved, CASE WHEN solved THEN '' ELSE event END AS word, count(*) {} AND e.status = 'done' AND failure "
        'IS NULL AND "limit" IS NULL GROUP BY solved, word'
    )
    counts: Counter[tuple[bool, str]] = Counter()
    for solved, event, count in listing.query(query, *chosen):
        counts[bool(solved), event] += count
    bars = [
        _bar("solved" if solved else event, count, f"{_episodes(count)}, {count / done:.1%}",
             f"outcome.solved && {_ENDED_BY_ITSELF}" if solved
             else f"!outcome.solved && {_ENDED_BY_ITSELF} && outcome.event == {_text(event)}",
             "good" if solved else "none")
        for (solved, event), count in counts.items()
    ]  # fmt: skip
    for cause in listing.causes(*chosen):
        label = f"limit: {cause.limit}" if cause.failure is None else f"{cause.failure} ({cause.blame})"
        words = f"{_episodes(cause.count)}, {cause.share:.1%}" + (f": {cause.message}" if cause.message else "")
        bars.append(_bar(label, cause.count, words, cause.filter, "warn" if cause.failure is None else "bad"))
    return sorted(bars, key=lambda bar: -bar["value"])


def _turns(listing: Listing, chosen: tuple[str, str], done: int) -> list[dict[str, Any]]:
    """The share of finished episodes that is solved by each turn."""
    column = MADE["solved_turn"]
    query = f"SELECT coalesce({column}, -1) AS turn, count(*) {{}} AND e.status = 'done' AND solved GROUP BY turn"
    solved: Counter[int] = Counter()
    for turn, count in listing.query(query, *chosen):
        solved[turn] += count
    bars, by_then = [], 0
    for turn in sorted(solved)[:BINS]:
        by_then += solved[turn]
        words = f"{by_then / done:.1%} solved by turn {turn}: {_episodes(solved[turn])} in this turn"
        bars.append(_bar(str(turn), by_then / done, words, f"outcome.solved && outcome.solved_turn == {turn}", "good"))
    return bars


def _tasks(listing: Listing, chosen: tuple[str, str]) -> list[dict[str, Any]]:
    """The tasks with the lowest success."""
    most = BINS if len(listing.sources) == 1 else -1  # the lowest of several stores together are not those of each
    query = (
        "SELECT e.task_id, count(*), total(solved) {} AND e.status = 'done' GROUP BY task_index, e.task_id ORDER BY "
        "total(solved) / count(*), task_index LIMIT :most"
    )
    tasks: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for task, count, solved in listing.query(query, *chosen, most=most):
        tasks[task][0] += count
        tasks[task][1] += int(solved)
    ranked = sorted(tasks, key=lambda task: tasks[task][1] / tasks[task][0])[:BINS]
    return [
        _bar(task, solved / count, f"{solved} of {count} solved", f"episode.task == {_text(task)}", "good")
        for task, (count, solved) in ((task, tasks[task]) for task in ranked)
    ]  # fmt: skip


def _states(listing: Listing, chosen: tuple[str, str]) -> list[dict[str, Any]]:
    """The mean seconds that an episode spends in each state."""
    heads = listing.heads(*chosen, SAMPLED)
    seconds: Counter[str] = Counter()
    for head in heads:
        seconds.update(head.seconds)
    of = f" of {_episodes(len(heads))}"
    return [
        _bar(state, total / len(heads), f"mean {total / len(heads):.4g} s{of}; a click chooses those above it",
             f"has(states.{state}) && states.{state} > {total / len(heads)!r}")
        for state, total in seconds.most_common(BINS) if state.isidentifier()
    ]  # fmt: skip
