"""Damages a row on its way to the guard, to show that the guard reads rows of this kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import engine.store.journal as journal
from engine.schemas.trajectory import Outcome, Trajectory
from engine.store.results import EncodedTrajectory


@contextmanager
def damaged_row(branch: int) -> Iterator[list[str]]:
    """The token before the last reply of a branch is another one when the guard gets it. Gives how the guard names that place."""
    write, places = journal.encode_trajectory, list[str]()

    def damaged(trajectory: Trajectory) -> EncodedTrajectory:
        if places:
            return write(trajectory)
        rows = list(trajectory.branches)
        row = rows[branch]
        last = max(span.start for span in row.spans if span.kind in ("generated", "unreceived"))
        ids = row.input_ids.copy()
        ids[last - 1] += 1
        rows[branch] = replace(row, input_ids=ids)
        places.append(f"branch {branch % len(rows)}, token {last - 1} (id {ids[last - 1]}): ")
        return write(replace(trajectory, branches=rows))

    journal.encode_trajectory = damaged
    try:
        yield places
    finally:
        journal.encode_trajectory = write


def assert_refused(outcome: Outcome, places: list[str]) -> None:
    """The guard has named the place, and nothing is trained on."""
    failure = outcome.failure
    assert failure is not None
    assert (failure.kind in ("bridge_differs", "prompt_differs"), failure.blame, outcome.trainable) == (
        True,
        "engine",
        False,
    )
    assert failure.message.startswith(places[0]), (failure.message, places)
