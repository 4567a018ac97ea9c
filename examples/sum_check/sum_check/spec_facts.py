"""What the section means for other parts of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.spec.added import AddedTool, SpecFacts
from sum_check.spec import SumCheckSpec

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`: the tool, if the section asks for it."""
    tool = AddedTool(path=("sum_check", "tool"), make="sum_check.tool:sums_tool")
    return SpecFacts(tools=(tool,) if SumCheckSpec.or_default(spec).tool else ())
