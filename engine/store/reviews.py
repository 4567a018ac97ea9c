"""What people say about finished episodes: a plugin keeps it beside the run, and it is read as the fact `review`.

Invariant: nothing of a review is in the run's tables, so the stored results of a run never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from engine.plugin import Hook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader

FACT = "review"
"""The name of the fact."""


class RunReviews(Protocol):
    """The reviews of a run's episodes."""

    def __len__(self) -> int: ...  # reviewed episodes

    def fact(self, episode: str) -> dict[str, Any]:
        """The value of the fact `review` of an episode, which nobody may have reviewed."""

    def of(self, episode: str) -> Sequence[Mapping[str, Any]]:
        """The reviews of an episode, one for each person."""

    def write(self, reviews: Iterable[Mapping[str, Any]]) -> None:
        """Add reviews, which replace those of the same person. Raises: StoreError: one is not valid; none is added."""


REVIEWS: Hook[Callable[[Path], RunReviews]] = Hook("reviews")
"""Opens the reviews of the run in a folder."""


def review_facts(folder: Path) -> Callable[[str], dict[str, Any]]:
    """Return what reviews add to the facts of an episode, by its id: nothing in a run without reviews."""
    for reviews in REVIEWS.made(None, folder):
        if len(reviews):
            return lambda episode: {FACT: reviews.fact(episode)}
    return lambda episode: {}


def with_reviews(store: RunReader, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """Yield the episodes of a run with the facts that reviews add."""
    facts = review_facts(store.folder)
    for trajectory in trajectories:
        added = facts(trajectory.episode_id)
        yield replace(trajectory, facts={**trajectory.facts, **added}) if added else trajectory
