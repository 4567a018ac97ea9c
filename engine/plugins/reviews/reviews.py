"""Reviews: what people say about the episodes of a run, in `reviews.jsonl` in its folder.

Invariant: a line is one person's whole review of one episode, on disk when `write` returns, and never changed. The
newest line of a person about an episode counts.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable, Mapping, Sequence
from getpass import getuser
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from engine.errors import StoreError
from engine.schemas.base import Contract
from engine.store.json_lines import JsonLines
from engine.store.private import private_file

FILE = "reviews.jsonl"
Tag = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$", max_length=40)]


class Review(Contract):
    """One person's review of one episode.

    Review(episode="bike/3", by="ann", rating=1, tags=["polite"], note="asks before it pays")
    """

    episode: str
    by: str = Field(default_factory=getuser, min_length=1, max_length=80)
    at: float = Field(default_factory=time.time)
    """Unix time."""
    rating: float | None = Field(default=None, ge=-100, le=100)
    """Above 0 is good, below 0 bad; None: not rated."""
    tags: list[Tag] = Field(default_factory=list)
    note: str = Field(default="", max_length=10_000)


class Reviews:
    """The reviews of a run. Several processes may write at once.

    Args:
        folder: The folder of the run.

    Raises:
        StoreError: the file cannot be read, or a line is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / FILE, Review.model_validate)
        self._newest: dict[str, dict[str, Review]] = {}
        for review in self._lines.read():
            self._add(review)

    def __len__(self) -> int:
        """Number of reviewed episodes."""
        return len(self._newest)

    def fact(self, episode: str) -> dict[str, Any]:
        """The value of the fact `review` of an episode: `rated`, the mean `rating` (0.0 if nobody rated it), `tags`,
        `notes`, `by`."""
        reviews = self._newest.get(episode, {}).values()
        ratings = [review.rating for review in reviews if review.rating is not None]
        return {
            "rated": bool(ratings),
            "rating": fmean(ratings) if ratings else 0.0,
            "tags": sorted({tag for review in reviews for tag in review.tags}),
            "notes": [review.note for review in reviews if review.note],
            "by": [review.by for review in reviews],
        }

    def of(self, episode: str) -> Sequence[Mapping[str, Any]]:
        """The reviews of an episode, one for each person."""
        return [review.model_dump(mode="json") for review in self._newest.get(episode, {}).values()]

    def write(self, reviews: Iterable[Mapping[str, Any]]) -> None:
        """Add reviews, which replace those of the same person.

        Args:
            reviews: Fields of `Review`; `by` is the name of the process's user if it is not given.

        Raises:
            StoreError: one is not valid, or the file cannot be written; none is added.
        """
        try:
            checked = [Review.model_validate(dict(review)) for review in reviews]
        except ValidationError as error:
            first = error.errors()[0]
            raise StoreError(f"review: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
        with private_file(self._lines.path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._lines.append(*(review.model_dump(mode="json") for review in checked))
        for review in checked:
            self._add(review)

    def _add(self, review: Review) -> None:
        people = self._newest.setdefault(review.episode, {})
        people.pop(review.by, None)
        if review.rating is not None or review.tags or review.note:  # else the person took an earlier one back
            people[review.by] = review
        elif not people:
            del self._newest[review.episode]
