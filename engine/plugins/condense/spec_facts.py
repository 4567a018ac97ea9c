"""What condensing means for other parts of a spec: the tool `expand`, a condenser of the spec's own, the summarising model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugins.condense.spec import CondenseSpec, OwnCondenserSpec, SummarySpec
from engine.schemas.entry import Entry
from engine.spec.added import AddedCode, AddedTool, PlayedRole, SpecFacts, TrainerUse

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.text.diagnostic import DataPath

_CONDENSER = ("condense", "condenser")
SUMMARY_ROLE = "condense"
"""The name of the summarising model among the roles."""


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    condense = CondenseSpec.section_of(spec)
    if condense is None:
        return SpecFacts(trainer_uses=_trainer_uses(spec, None))
    expand = AddedTool(path=("condense", "expand"), make="engine.plugins.condense.expand:expand_tool")
    code: tuple[AddedCode, ...] = ()
    roles: dict[DataPath, PlayedRole] = {}
    if isinstance(own := condense.condenser, OwnCondenserSpec):
        entry = Entry(use=own.use, with_=own.with_)
        code = (
            AddedCode(
                path=_CONDENSER,
                entry=entry,
                part="condenser",
                takes=("text", "budget", "view"),
                isolation=own.isolation,
            ),
        )
    if isinstance(summary := condense.condenser, SummarySpec):
        fields = ("task", "text", "tokens")
        roles[_CONDENSER] = PlayedRole(
            name=SUMMARY_ROLE, spec=summary.role, blame="environment", kinds="condense", fields=fields
        )
    return SpecFacts(
        tools=(expand,) if condense.expand else (),
        code=code,
        roles=roles,
        trainer_uses=_trainer_uses(spec, condense),
    )


def _trainer_uses(spec: EpisodeSpec, condense: CondenseSpec | None) -> tuple[TrainerUse, ...]:
    """A condensed conversation has several branches."""
    if condense is not None:
        path = ("condense",) if condense.keep is None else ("condense", "keep")
        return (TrainerUse(thing="branches", path=path, fix=f"remove `{'.'.join(path)}`, or use another trainer"),)
    if spec.limits.value_of("on_overflow") == "condense":
        fix = "set `limits.on_overflow: end`, or use another trainer"
        return (TrainerUse(thing="branches", path=("limits", "on_overflow"), fix=fix),)
    return ()
