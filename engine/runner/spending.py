"""The file in which a run, or a training with its evaluations, counts its cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.actions.role_models import backend_specs
from engine.backends.budget import Budget

if TYPE_CHECKING:
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
