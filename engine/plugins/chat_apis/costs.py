"""The cost of a run, or of a training with its evaluations, counted in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.actions.services import Cost, EpisodeService
from engine.plugins.chat_apis.backend import ApiBackend
from engine.plugins.chat_apis.budget import Budget
from engine.plugins.chat_apis.spec import CostSpec
from engine.spec.added import backends_of

if TYPE_CHECKING:
    from pathlib import Path

    from engine.actions.services import ServiceInputs
    from engine.backends.backend import Backend

COSTS = "costs.jsonl"
"""Name of the file in the folder of the run or training."""


class CountedCosts(EpisodeService):
    """Counts what the chat APIs of the policy and of roles cost.

    Args:
        file: Where costs are counted. Runners of one training count in one file.
        most: What the run or training may cost; None: any amount.
    """

    order = 1  # it counts in the backends of other services

    def __init__(self, file: Path, most: float | None) -> None:
        self._file = file
        self._most = most
        self._budget: Budget | None = None
        self._before: dict[ApiBackend, Budget | None] = {}
        """What counted the costs of each backend before."""

    async def start(self, backends: Sequence[Backend]) -> None:
        """Begin to count. Raises: OSError: the file cannot be read or created."""
        self._budget = Budget(self._file, self._most)
        for backend in backends:
            if isinstance(backend, ApiBackend):
                self._before[backend] = backend.budget
                backend.budget = self._budget

    async def close(self) -> None:
        """Count no more."""
        for backend, before in self._before.items():
            backend.budget = before
        self._before.clear()
        if self._budget is not None:
            self._budget.close()

    @property
    def cost(self) -> Cost | None:
        """The costs in the file."""
        return None if self._budget is None else Cost(spent=self._budget.count(), most=self._most)


def open_service(inputs: ServiceInputs) -> CountedCosts | None:
    """The hook `open_service`: counts if a backend of the spec has prices."""
    spec = inputs.loaded.spec
    if inputs.folder is None or not any(backend.priced for backend in backends_of(spec).values()):
        return None
    return CountedCosts(inputs.folder / COSTS, CostSpec.or_default(spec.rollout).max_cost)
