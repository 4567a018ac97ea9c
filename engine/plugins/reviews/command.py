"""`engine rate`: ratings, tags and notes of a person on finished episodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import RunsFolder, StoredRun, only_looks
from engine.terminal import echo

if TYPE_CHECKING:
    from engine.store.reader import RunReader


@only_looks
def rate(
    run: StoredRun,
    episodes: Annotated[
        list[str] | None, typer.Argument(metavar="[EPISODE]…", help="Ids of finished episodes: TASK/SAMPLE.")
    ] = None,
    rating: Annotated[float | None, typer.Option(help="A number: above 0 is good, below 0 bad.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A word to add; may be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A word to take off.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="A note, which replaces your earlier one.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take your review back, before the other options.")] = False,
    filter: Annotated[
        str | None, typer.Option(metavar="CEL", help="All finished episodes for which this holds, as in `export`.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose review it is. Default: the name of the user.")
    ] = None,
    out: RunsFolder = Path("runs"),
) -> None:
    """Rate, tag and note finished episodes, also in a run that is still running.

    A review stands in `reviews.jsonl` in the run's folder, and your newest one of an episode counts. Filters and the
    rules of `engine rescore` read it as the fact `review`: 'facts.review.rating > 0', '"polite" in facts.review.tags'.
    Exported rows have it in the column `facts`.
    """
    from getpass import getuser

    from engine.plugins.reviews.reviews import Reviews
    from engine.store.find import find_run
    from engine.store.store import RunStore

    if bool(episodes) == bool(filter):
        wrong_usage("name episodes, or choose them with --filter CEL")
    if rating is None and not tag and not untag and note is None and not clear:
        wrong_usage("nothing to say: give --rating, --tag, --untag, --note or --clear")
    person = by or getuser()
    with errors_exit(USAGE), RunStore.open(find_run(run, out), readonly=True) as store:
        reviews = Reviews(store.folder)
        changed = []
        for episode in dict.fromkeys(_chosen(store, episodes or [], filter)):
            earlier = next((review for review in reviews.of(episode) if review["by"] == person and not clear), {})
            tags = [*earlier.get("tags", []), *(tag or [])]
            changed.append(
                {
                    "episode": episode,
                    "by": person,
                    "rating": earlier.get("rating") if rating is None else rating,
                    "tags": [name for name in dict.fromkeys(tags) if name not in (untag or [])],
                    "note": earlier.get("note", "") if note is None else note,
                }
            )
        reviews.write(changed)
        echo(f"{len(changed)} episodes of {store.run_id} reviewed by {person}; {len(reviews)} have a review")


def _chosen(store: RunReader, episodes: list[str], filter: str | None) -> Iterator[str]:
    """The ids of the episodes. Raises: StoreError: one is not there or not finished, or the filter is not valid."""
    from engine.errors import StoreError
    from engine.store.episode_filter import EpisodeFilter

    if filter is not None:
        keep = EpisodeFilter(store, filter)
        yield from (trajectory.episode_id for trajectory in store.trajectories() if keep(trajectory))
    for name in episodes:
        if store.episode(name).status != "done":
            raise StoreError(f"{name} is not finished, and only finished episodes can be reviewed")
        yield name
