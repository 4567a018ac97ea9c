"""What `train.eval` means for other parts of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.evaluation.spec import TrainEvalSpec
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    section = None if spec.train is None else TrainEvalSpec.section_of(spec.train)
    if section is None:
        return SpecFacts()
    tasks = [one.tasks for one in section.by_name().values() if one.tasks is not None]
    return SpecFacts(samples_weights=True, tasks=tuple(tasks))
