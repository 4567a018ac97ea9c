"""The function that gets notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.notices.spec import NotifySpec
from engine.spec.added import Called, SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    use = NotifySpec.or_default(spec).use
    return SpecFacts(
        called=(Called(use=use, arguments=("event",), with_={}, path=("notify", "use"), path_with=("notify", "with")),)
        if use
        else ()
    )
