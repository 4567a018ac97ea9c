"""`engine show`: shows a run's episodes in a table, or one episode from beginning to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.store.store import EpisodeRow, RunStore


def show(
    run: Annotated[str, typer.Argument(help="A run's folder, its id or the beginning of it, or `latest`.")],
    episode: Annotated[
        str | None, typer.Argument(help="An episode: TASK/SAMPLE, or TASK if it has one sample.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder in which runs are stored.")] = Path("runs"),
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of episodes in the table.")] = 100,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that failed.")] = False,
    score: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Use the rewards of this score of `engine rescore`.")
    ] = None,
) -> None:
    """Show a stored run, also one that is still running.

    Without EPISODE: every episode, how it ended, its turns, tokens and reward. With it: the messages, the reward of
    each turn, and who moved which reward between turns, when and why.
    """
    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.store.find import find_run
    from engine.store.store import RunStore

    console = make_console()
    try:
        with RunStore.open(find_run(run, out), readonly=True) as store:
            if episode is None:
                _table(console, store, limit, failed=failed, score=score)
            else:
                _show_episode(console, store, episode, score)
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None


def _table(console: Console, store: RunStore, limit: int, *, failed: bool, score: str | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from engine.cli.episode_report import ended, row_style, status

    rows = store.episodes(score)
    states = store.current_states()
    run_status = store.status
    shown = [row for row in rows if row.failure] if failed else rows
    table = Table(
        "episode", "status", "ended", "turns", "tokens", "reward", "seconds", header_style="bold", box=box.SIMPLE_HEAD
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for row in shown[:limit]:
        done = row.status == "done"
        seconds = row.ended - row.started if row.ended and row.started else None
        table.add_row(
            Text(row.id),
            status(row, run_status),
            Text(ended(row) if done else states.get(row.id, "")),
            str(row.turns) if done else "",
            str(row.tokens) if done else "",
            f"{row.reward:+.3f}" if row.reward is not None else "",
            f"{seconds:.1f}" if seconds is not None else "",
            style=row_style(row),
        )
    finished = [row for row in rows if row.status == "done"]
    place = f" · {run_status} · {store.folder}" + (f" · score {score}" if score else "")
    console.print(Text.assemble((store.run_id, "bold"), place), soft_wrap=True)
    if shown:
        console.print(table)
    if len(shown) > limit:
        console.print(f"… and {len(shown) - limit} more: --limit {len(shown)} shows them")
    line = f"{len(finished)} of {len(rows)} episodes done"
    if finished:
        line += f" · mean reward {sum(row.reward or 0.0 for row in finished) / len(finished):.3f}"
        line += f" · {sum(bool(row.solved) for row in finished)} solved"
        line += f" · {sum(row.failure is not None for row in finished)} failed"
    console.print(line)
    labels = [head.label for head in store.scores() if head.label != score]
    if labels:
        console.print(f"Other scores: --score {' | '.join(labels)}", style="dim", soft_wrap=True)
    if finished:
        first = next((row for row in finished if row.failure), finished[0])
        console.print(f"To show one: engine show {store.run_id} {first.id}", style="dim", soft_wrap=True)


def _show_episode(console: Console, store: RunStore, name: str, score: str | None) -> None:
    from engine.cli.episode_report import print_finished, print_unfinished

    row = _find(store, name)
    if row.status == "done":
        told = store.trajectory(row.id, score)
        print_finished(console, told, next(each for each in store.episodes(score) if each.id == row.id))
    else:
        print_unfinished(console, row, store.journal(row.id), store.status)


def _find(store: RunStore, name: str) -> EpisodeRow:
    from engine.errors import StoreError

    rows = store.episodes()
    exact = [row for row in rows if row.id == name] or [row for row in rows if row.task_id == name]
    if len(exact) == 1:
        return exact[0]
    if exact:
        raise StoreError(f"task `{name}` has {len(exact)} episodes: {', '.join(row.id for row in exact[:8])}; name one")
    return store.episode(name)
