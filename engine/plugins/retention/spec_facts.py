"""What `rollout.keep` means for other parts of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.retention.spec import KeepSpec
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    if spec.train is None or KeepSpec.section_of(spec.rollout) is None:
        return SpecFacts()
    message = "`keep` is not supported in a training with several drivers: their stores are not compacted"
    return SpecFacts(one_process=((message, ("rollout", "keep"), "remove it, or set `rollout.drivers: 1`"),))
