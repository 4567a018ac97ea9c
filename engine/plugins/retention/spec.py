"""`rollout.keep`: what stays of a training's episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from engine.schemas.sections import SpecSection
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


class KeepSpec(SpecSection):
    """Which groups of episodes a training keeps in its store. A group stays if one of the keys holds for it.

    After each checkpoint the tokens, messages and journals of the others are dropped, except those that a resume needs;
    their outcome, reward and counts stay. All episodes stay if it is not set.
    """

    NULLABLE: ClassVar[bool] = True

    steps: int = Field(default=10, ge=0)
    """The groups of the last `steps` steps."""
    failures: bool = False
    """Groups with an episode that failed."""
    sample: float = Field(default=0.0, ge=0.0, le=1.0)
    """This fraction of all groups, chosen by their task and epoch."""
    trained: bool = False
    """Groups that a step was trained on. The others are those without signal, cancelled or too old ones."""


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    if spec.train is None or KeepSpec.section_of(spec.rollout) is None:
        return SpecFacts()
    message = "`keep` is not supported in a training with several drivers: their stores are not compacted"
    return SpecFacts(one_process=((message, ("rollout", "keep"), "remove it, or set `rollout.drivers: 1`"),))
