"""What `rollout.max_cost` means for other parts of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.chat_apis.spec import CostSpec
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    if CostSpec.or_default(spec.rollout).max_cost is None:
        return SpecFacts()
    message = "`max_cost` is not supported with several drivers: each counts its own cost"
    return SpecFacts(
        one_process=((message, ("rollout", "max_cost"), "remove it, or set `rollout.drivers: 1`"),),
    )
