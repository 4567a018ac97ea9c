"""Advantages of the episodes of one task, as the rows of `engine export` have them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import EngineError
from engine.schemas.base import Struct
from engine.store.rows.build import RowBuilder

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader
    from engine.store.rows.row import TrainingRow


class Advantages(Struct, frozen=True, kw_only=True, eq=False):
    """The training rows of a group, by episode and branch."""

    method: str
    """The credit method."""
    missing: str = ""
    """Why there are no advantages; empty where there are."""
    rows: dict[tuple[str, int], TrainingRow] = msgspec.field(default_factory=dict)

    @classmethod
    def none(cls, why: str) -> Advantages:
        """Return no advantages, with the reason."""
        return cls(method="", missing=why)

    @classmethod
    def of_group(cls, store: RunReader, task_id: str) -> Advantages:
        """Compute the advantages of a task's finished episodes with the credit method of the run's spec."""
        return _of_done(store, tuple(row.id for row in store.samples(task_id) if row.status == "done"))

    @classmethod
    def of(cls, store: RunReader, group: list[Trajectory]) -> Advantages:
        """Compute the advantages of a group's finished episodes. Methods that need a critic's values have none."""
        try:
            builder = RowBuilder.of_run(store)
            rows = {(row.episode.episode_id, row.branch.index): row for row in builder.rows(group)}
        except EngineError as error:
            return cls.none(str(error))
        missing = "evaluations have none" if builder.evaluation else ""
        return cls(method=builder.credit.method, missing=missing, rows=rows)

    def of_branch(self, episode_id: str, branch: int) -> Any:
        """Return the advantage of each token of a branch, float32 [tokens]; None if its row is not trainable."""
        row = self.rows.get((episode_id, branch))
        return None if row is None or not len(row.advantages) else row.on_tokens(row.advantages)

    def of_turn(self, episode_id: str, turn: int) -> float | None:
        """Return the mean advantage of a turn's sampled tokens; None if it is not trained on."""
        for (episode, _), row in self.rows.items():
            if episode == episode_id and len(row.advantages):
                of_turn = row.advantages[row.branch.turn_ids[row.places] == turn]
                if len(of_turn):
                    mean = float(of_turn.mean(dtype="float64"))
                    return mean if math.isfinite(mean) else None
        return None


@lru_cache(maxsize=4)
def _of_done(store: RunReader, episodes: tuple[str, ...]) -> Advantages:
    """Advantages of finished episodes, which do not change any more."""
    return Advantages.of(store, [store.trajectory(episode) for episode in episodes])
