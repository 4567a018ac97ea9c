"""The cost of a run, or of a training with its evaluations, counted in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.actions.role_models import backend_specs
from engine.plugins.chat_apis.budget import Budget

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.schemas.episode import EpisodeSpec

COSTS = "costs.jsonl"
"""Name of the file in the folder of the run or training."""


def open_budget(spec: EpisodeSpec, folder: Path) -> Budget | None:
    """The costs so far and `rollout.max_cost`; the caller closes it. None if no backend of the spec has prices.

    Raises:
        OSError: the file cannot be read or created.
    """
    if not any(section.priced for section in backend_specs(spec)):
        return None
    return Budget(folder / COSTS, spec.rollout.max_cost)


@contextmanager
def paying(
    spec: EpisodeSpec, folder: Path, backends: Sequence[Backend], shared: Budget | None
) -> Iterator[Budget | None]:
    """Count what backends cost inside the block; yields the costs, None if no backend of the spec has prices.

    Args:
        spec: The spec.
        folder: The folder of the run or training.
        backends: They count their requests.
        shared: The costs of the training that the episodes are part of; None: those in `folder`.

    Raises:
        OSError: as `open_budget`.
    """
    budget = shared or open_budget(spec, folder)
    for backend in backends:
        backend.budget = budget
    try:
        yield budget
    finally:
        for backend in backends:
            backend.budget = None
        if budget is not None and shared is None:
            budget.close()
