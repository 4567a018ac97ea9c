"""The key `train.difficulty`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from engine.schemas.sections import SpecSection
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


class DifficultySpec(SpecSection):
    """Draw tasks less often that the policy always or never solves: their groups have no signal."""

    NULLABLE: ClassVar[bool] = True

    window: int = Field(default=8, ge=1)
    """Newest episodes of a task from which its solve rate is computed. A task with fewer episodes is drawn as others
    are."""
    low: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Tasks with at most this solve rate are too hard."""
    high: float = Field(default=1.0, gt=0.0, le=1.0)
    """Tasks with at least this solve rate are too easy."""
    keep: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Part of the draws of such a task that are made all the same, so that its rate is measured again. 0: none."""
    solved_at: float | None = None
    """An episode is solved if its reward is at least this. Default: if the environment, a tool or the user reported it
    as solved."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"`low` ({self.low}) must be less than `high` ({self.high})")
        return self


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    return SpecFacts(reads_seed=spec.train is not None and DifficultySpec.section_of(spec.train) is not None)
