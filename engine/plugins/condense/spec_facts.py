"""What condensing means for other parts of a spec: the tool `expand`, a condenser of the spec's own, the summarising
model, and the states that `limits.on_overflow: condense` adds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.machine.machine import ResolvedMachine, ResolvedTransition
from engine.plugins.condense.spec import CondenseSpec, OwnCondenserSpec, SummarySpec
from engine.schemas.entry import Entry
from engine.schemas.machine import StateSpec
from engine.spec.added import AddedCode, AddedTool, PlayedRole, SpecFacts, TrainerUse

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.text.diagnostic import DataPath

_CONDENSER = ("condense", "condenser")
SUMMARY_ROLE = "condense"
"""The name of the summarising model among the roles."""
CONDENSING, ASKING_SUMMARY, SUMMARIZING = "CONDENSING", "ASKING_SUMMARY", "SUMMARIZING"


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    condense = CondenseSpec.section_of(spec)
    if condense is None:
        if spec.limits.value_of("on_overflow") != "condense":
            return SpecFacts()
        fix = "set `limits.on_overflow: end`, or use another trainer"
        return SpecFacts(trainer_uses=(TrainerUse(thing="branches", path=("limits", "on_overflow"), fix=fix),))
    expand = AddedTool(path=("condense", "expand"), make="engine.plugins.condense.record:expand_tool")
    code: tuple[AddedCode, ...] = ()
    roles: dict[DataPath, PlayedRole] = {}
    if isinstance(condenser := condense.condenser, OwnCondenserSpec):
        entry = Entry(use=condenser.use, with_=condenser.with_)
        code = (
            AddedCode(
                path=_CONDENSER,
                entry=entry,
                part="condenser",
                takes=("text", "budget", "view"),
                isolation=condenser.isolation,
            ),
        )
    if isinstance(summary := condense.condenser, SummarySpec):
        fields = ("task", "text", "tokens")
        roles[_CONDENSER] = PlayedRole(
            name=SUMMARY_ROLE, spec=summary.role, blame="environment", kinds="condense", fields=fields
        )
    path: tuple[str, ...] = ("condense",) if condense.keep is None else ("condense", "keep")
    fix = f"remove `{'.'.join(path)}`, or use another trainer"
    return SpecFacts(
        tools=(expand,) if condense.expand else (),
        code=code,
        roles=roles,
        trainer_uses=(TrainerUse(thing="branches", path=path, fix=fix),),  # it has several branches
    )


def with_condensing(spec: EpisodeSpec, machine: ResolvedMachine) -> ResolvedMachine:
    """Add, for each state that generates and does not handle `overflow`, the states that condense and lead back to it.

    Only with `limits.on_overflow: condense`. They take over its transitions for `limit` and `failed`. A state of the
    same name in the spec is used as it is, with its own transitions first.
    """
    if spec.limits.value_of("on_overflow") != "condense":
        return machine
    by_policy = CondenseSpec.or_default(spec).condenser.kind == "policy"
    states, transitions = dict(machine.states), list(machine.transitions)
    handled = {(t.source, t.trigger) for t in transitions}
    generating = [
        name
        for name, state in states.items()
        if state.action == "generate" and not state.final and name != SUMMARIZING and (name, "overflow") not in handled
    ]
    for source in generating:
        suffix = "" if len(generating) == 1 else f"_{source}"
        way = [CONDENSING + suffix]
        if by_policy:
            way = [ASKING_SUMMARY + suffix, SUMMARIZING + suffix, *way]
        actions = {CONDENSING: "condense", ASKING_SUMMARY: "ask_summary", SUMMARIZING: "generate"}
        for name in way:
            states.setdefault(name, StateSpec(action=actions[name.removesuffix(suffix)]))
        steps = [ResolvedTransition(trigger="overflow", source=source, dest=way[0])]
        if by_policy:
            steps.append(ResolvedTransition(trigger="asked", source=way[0], dest=way[1]))
            replied = ("answered", "tool_calls", "malformed", "truncated")
            steps += [ResolvedTransition(trigger=event, source=way[1], dest=way[2]) for event in replied]
        steps += [
            ResolvedTransition(trigger=event, source=way[-1], dest=source) for event in ("unchanged", "condensed")
        ]
        ends = [t for t in machine.transitions if t.source == source and t.trigger in ("limit", "failed", "aborted")]
        transitions += [step for step in steps if (step.source, step.trigger) not in handled]
        for name in way:
            transitions += [replace(t, source=name) for t in ends if (name, t.trigger) not in handled]
    return replace(machine, states=states, transitions=transitions)
