"""`engine show`: shows the episodes of a run or a training in a table, or one episode from beginning to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Imports, Json, RunsFolder, Score, only_looks
from engine.terminal import echo_json

if TYPE_CHECKING:
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow


@only_looks
def show(
    run: Annotated[
        str,
        typer.Argument(
            help="A run or a training: its folder, its id or the beginning of it, or `latest`; an evaluation of a "
            "training: TRAINING/evals/step-000010."
        ),
    ],
    episode: Annotated[
        str | None, typer.Argument(help="An episode: TASK/SAMPLE, or TASK if it has one sample.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="Only episodes for which this holds: an expression over the variables of guards, `outcome`, `episode` "
            "and `run`, such as 'outcome.reward < 0.5 && turns.assistant > 3 && task.level == \"hard\"'.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only episodes in which this was said, in any case.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Sort by order, reward, reward:NAME, turns, tokens, seconds, outcome, version, step, …; -KEY: the "
            "largest first.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of episodes in the table.")] = 100,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that failed.")] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens", help="With EPISODE: every sampled token with its id, log-prob, mask, advantage and version."
        ),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With EPISODE: its Nth attempt, from 1."),
    ] = None,
    score: Score = None,
    out: RunsFolder = Path("runs"),
    json: Json = False,
    imports: Imports = None,
) -> None:
    """Show a stored run or training, also one that is still running.

    Without EPISODE: every episode, how it ended, its turns, tokens and reward. With it: the task, the messages, the
    reward of each turn, who moved which reward between turns, when and why, the facts, and the path through the
    machine.
    """
    from engine.cli.validate.command import collections_paused

    with errors_exit(USAGE), collections_paused():
        from engine.plugins.show.listing.sources import find
        from engine.plugins.show.show_list import show_list

        folder = find(run, out)
        if episode is None:
            if tokens or attempt is not None:
                wrong_usage("--tokens and --attempt need an EPISODE")
            show_list(folder, filter=filter, text=text, sort=sort, limit=limit, failed=failed, score=score, json=json)
            return
        for option, value in (("--filter", filter), ("--text", text), ("--sort", sort), ("--failed", failed)):
            if value:
                wrong_usage(f"{option} chooses episodes for the table; leave out EPISODE, or leave out {option}")
        _show_episode(folder, episode, score, tokens=tokens, attempt=attempt, json=json)


def _show_episode(folder: Path, name: str, score: str | None, *, tokens: bool, attempt: int | None, json: bool) -> None:
    from engine.console import make_console
    from engine.errors import StoreError
    from engine.plugins.show.episode_report import print_finished, print_tokens, print_unfinished, token_documents
    from engine.plugins.show.listing.episode import episode_document
    from engine.plugins.show.listing.sources import episodes_of
    from engine.store.store import RunStore

    with RunStore.open(episodes_of(folder), readonly=True) as store:
        row = _find(store, name)
        if attempt is not None and attempt > row.attempt + 1:
            raise StoreError(
                f"{row.id} has {row.attempt + 1} attempt{'s' * (row.attempt > 0)}; give --attempt 1 to "
                f"{row.attempt + 1}"
            )
        number = None if attempt is None else attempt - 1
        earlier = number is not None and number < row.attempt
        finished = row.status == "done" and not earlier
        if score is not None and not finished:
            raise StoreError("a score has the results of finished episodes only; leave out --score")
        if json:
            if score is not None:
                wrong_usage("--json shows the run's own rewards; leave out --score")
            document = episode_document(store, row.id, number)
            if tokens:
                document["tokens"] = token_documents(store, row.id, finished=finished)
            echo_json(document)
            return
        console = make_console()
        if finished:
            print_finished(
                console,
                store,
                store.trajectory(row.id, score),
                row if score is None else next(other for other in store.episodes(score) if other.id == row.id),
            )
        else:
            print_unfinished(console, store, row, store.journal(row.id, number), number if earlier else None)
        if tokens:
            if earlier:
                wrong_usage("the tokens of an earlier attempt are in --json alone; leave out --tokens")
            print_tokens(console, store, row.id, finished=finished)


def _find(store: RunReader, name: str) -> EpisodeRow:
    from engine.errors import StoreError

    try:
        return store.episode(name)
    except StoreError:
        samples = store.samples(name)
        if len(samples) == 1:
            return samples[0]
        if not samples:
            raise
    names = ", ".join(row.id for row in samples[:8])
    raise StoreError(f"task `{name}` has {len(samples)} episodes: {names}; name one")
