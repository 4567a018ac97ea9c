"""The table of episodes of `engine show`, and the same rows as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from engine.cli.exits import wrong_usage
from engine.console import make_console
from engine.plugins.show.listing.listing import Listing
from engine.plugins.show.listing.rows import Totals, outcome_word, status_word
from engine.plugins.show.listing.sources import is_training
from engine.plugins.show.listing.training import Training
from engine.store.dropped import dropped_words
from engine.terminal import echo_json

if TYPE_CHECKING:
    from rich.console import Console

    from engine.plugins.show.listing.rows import Cause, Page, Row

_NAMES = 3
"""Maximum number of rewards that have a column of their own."""


def show_list(
    folder: Path,
    *,
    filter: str | None,
    text: str | None,
    sort: str | None,
    limit: int,
    failed: bool,
    score: str | None,
    json: bool,
) -> None:
    """Print the episodes of a run or a training that the options of `engine show` choose.

    Raises:
        StoreError: it cannot be read, or the filter or the sort key is not valid.
    """
    if score is not None and (filter or sort or json):
        wrong_usage("--filter, --sort and --json use the run's own rewards; leave out --score")
    training = is_training(folder)
    console = make_console()
    with Listing([folder]) as listing:
        if failed:
            failure = 'outcome.failure != ""'
            filter = f"({filter}) && {failure}" if filter else failure
        only_training = training and "run." not in (filter or "")
        if only_training:  # else evaluations would stand among the episodes of the training
            filter = f"!run.evaluation && ({filter})" if filter else "!run.evaluation"
        sort = sort or ("-step" if training else "order")
        page = listing.page(
            filter,
            text,
            sort.removeprefix("-"),
            sort.startswith("-"),
            0,
            2**31 if score is not None else limit,
        )
        totals = listing.totals(filter, text)
        if score is not None:
            page, totals = _rescored(listing, page, score)
        if json:
            echo_json(
                {
                    "run": listing.store(listing.sources[0].key).shards_only or str(folder),
                    "total": page.total,
                    "skipped": page.skipped,
                    "dropped": listing.store(listing.sources[0].key).dropped().episodes,
                    "rows": [row.plain() for row in page.rows],
                    "causes": [cause.plain() for cause in listing.causes(filter, text)],
                }
            )
            return
        _head(console, folder, listing, score)
        if page.rows:
            console.print(_table(page.rows[:limit], listing, many=training and not only_training))
        causes = listing.causes(filter, text) if score is None else []
        _foot(console, folder, listing, page, totals, causes, limit, score)


def _rescored(listing: Listing, page: Page, score: str) -> tuple[Page, Totals]:
    """The same episodes with the results of a score; those that the score does not have are left out."""
    (source, *_) = listing.sources
    results = {row.id: row for row in listing.store(source.key).episodes(score)}
    rows = [
        replace(
            row,
            outcome=outcome_word(now.failure, now.blame, now.limit, now.solved, now.event or ""),
            failure=now.failure,
            solved=now.solved,
            reward=now.reward,
            rewards={},
        )
        for row in page.rows
        if (now := results.get(row.episode)) is not None and row.status == "done"
    ]
    return replace(page, rows=rows, total=len(rows)), Totals(
        episodes=len(rows),
        done=len(rows),
        solved=sum(bool(row.solved) for row in rows),
        failed=sum(row.failure is not None for row in rows),
        limited=sum(row.failure is None and row.limit is not None for row in rows),
        reward=sum(row.reward or 0.0 for row in rows) / len(rows) if rows else None,
    )


def _head(console: Console, folder: Path, listing: Listing, score: str | None) -> None:

    source = listing.sources[0]
    place = f" · {source.status} · {listing.store(source.key).shards_only or folder}" + (
        f" · score {score}" if score else ""
    )
    if not is_training(folder):
        console.print(Text.assemble((listing.store(source.key).run_id, "bold"), place), soft_wrap=True)
        return
    training = Training(folder)
    newest = training.lines[-1] if training.lines else {}
    planned = f" of {training.planned}" if training.planned else ""
    console.print(Text.assemble((folder.name, "bold"), f" · training{place}"), soft_wrap=True)
    parts = [f"step {newest.get('step', 0)}{planned}"]
    parts += [
        f"{words} {newest[name]:.3f}"
        for words, name in (("reward", "reward/mean"), ("loss", "loss"))
        if newest.get(name) is not None
    ]
    console.print(" · ".join(parts), soft_wrap=True)
    for evaluation in training.evaluations():
        values = [
            f"{name.removeprefix('eval/')} {value:.3f}"
            for name, value in list(evaluation.metrics.items())[:4]
            if value is not None
        ]
        words = " · ".join(values) or "no metrics yet"
        console.print(f"evaluation after step {evaluation.step}: {words} · {evaluation.run}", soft_wrap=True)


def _table(rows: Sequence[Row], listing: Listing, *, many: bool) -> Table:
    names = sorted({name for row in rows for name in row.rewards})
    names = names if 1 < len(names) <= _NAMES else []
    steps = any(row.step is not None for row in rows)
    versions = any(row.versions and row.versions[1] > 0 for row in rows)
    unfinished = any(row.status != "done" for row in rows)
    reviews = [row.review or {"rated": False, "rating": 0.0, "tags": []} for row in rows]
    rated, tagged = any(review["rated"] for review in reviews), any(review["tags"] for review in reviews)
    columns = [
        *(["run"] if many else []),
        "episode",
        *(["step"] if steps else []),
        *(["status"] if unfinished else []),
        "ended",
        "turns",
        "tokens",
        "reward",
        *names,
        *(["version"] if versions else []),
        "seconds",
        *(["rating"] if rated else []),
        *(["tags"] if tagged else []),
    ]
    statuses = {source.key: source.status for source in listing.sources}
    table = Table(*columns, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[columns.index("ended") + 1 :]:
        column.justify = "right"
    for column, name in zip(table.columns, columns, strict=True):
        column.no_wrap = name not in ("run", "ended")  # an id that is cut cannot be copied
    for row, review in zip(rows, reviews, strict=True):
        cells = [
            *([row.run.partition("/")[2] or row.run] if many else []),  # the head names the training
            row.episode,
            *(["" if row.step is None else str(row.step)] if steps else []),
            *([status_word(row.status, statuses[row.run])] if unfinished else []),
            row.outcome if row.status == "done" else row.state or "",
            str(row.turns["assistant"]) if row.turns.get("assistant") is not None else "",
            str(row.tokens["sampled"]) if row.tokens.get("sampled") is not None else "",
            _signed(row.reward),
            *(_signed(row.rewards.get(name)) for name in names),
            *(["–".join(map(str, dict.fromkeys(row.versions)))] if versions else []),
            f"{row.seconds:.1f}" if row.seconds is not None else "",
            *([f"{review['rating']:+g}" if review["rated"] else ""] if rated else []),
            *([" ".join(review["tags"])] if tagged else []),
        ]
        style = "red" if row.failure is not None else "dim" if row.status != "done" else "green" if row.solved else ""
        table.add_row(*map(Text, cells), style=style)
    return table


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _foot(
    console: Console,
    folder: Path,
    listing: Listing,
    page: Page,
    totals: Totals,
    causes: Sequence[Cause],
    limit: int,
    score: str | None,
) -> None:
    if page.total > limit:
        console.print(f"… and {page.total - limit} more: --limit {page.total} shows them")
    line = f"{totals.done} of {totals.episodes} episodes done"
    if totals.done:
        line += f" · mean reward {totals.reward or 0.0:.3f} · {totals.solved} solved · {totals.failed} failed"
        line += f" · {totals.limited} ended by a limit" if totals.limited else ""
    console.print(line)
    if page.skipped:
        console.print(
            f"{page.skipped} episodes are left out because the filter has no value for them: {page.skipped_because}",
            style="yellow",
            soft_wrap=True,
        )
    for cause in [cause for cause in causes if cause.failure][:5]:
        message = " ".join((cause.message or "").split())
        shown = message if len(message) <= 160 else f"{message[:159]}…"
        console.print(f"{cause.count} × {cause.failure} ({cause.blame}): {shown}", style="red", soft_wrap=True)
    store = listing.store(listing.sources[0].key)
    if dropped := dropped_words(store):
        console.print(dropped, style="yellow", soft_wrap=True)
    labels = [head.label for head in store.scores() if head.label != score]
    if labels:
        console.print(f"Other scores: --score {' | '.join(labels)}", style="dim", soft_wrap=True)
    done = [row for row in page.rows if row.status == "done"]
    if done:
        first = next((row for row in done if row.failure), done[0])
        # the store of a training's episodes is named by the training
        run = first.run.removesuffix("/rollouts") if "/" in first.run else folder.name
        console.print(
            f"To show one: engine show {store.shards_only or run} {first.episode}",
            style="dim",
            soft_wrap=True,
        )
