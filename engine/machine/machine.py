"""A spec's machine as a pure function: (state, event, values) -> state.

Invariant: all episodes of a spec share one `transitions.Machine`, which never changes after it is built. No model is
added to it: each step triggers on a temporary model, so steps of different tasks and threads are independent.

`Machine` and the checks read a resolved machine: the spec's machine merged with its preset, one transition for each
(source, trigger), in the order in which they are tried. Each knows the index of the spec's transition that it came
from, so that findings have a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, GuardError, SpecError
from engine.machine.guards import Guard
from engine.machine.presets import PRESETS
from engine.plugin import load
from engine.schemas.base import Struct
from engine.schemas.limits import ALWAYS
from engine.schemas.machine import ANY, SAME, MachineSpec, StateSpec, TransitionSpec
from engine.schemas.sections import written_actions
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.spec.text.near import near_or_known

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec

ReadContext = Callable[[frozenset[str]], Mapping[str, Any]]
"""Builds the requested guard variables, and no others."""


class ResolvedTransition(Struct, frozen=True, kw_only=True):
    """The destination of one event in one state, if its condition holds."""

    trigger: str
    source: str
    dest: str
    conditions: str | None = None
    """`conditions` and `unless` as one CEL expression; None: always."""
    index: int | None = None
    """Index in the spec's `machine.transitions`; None if it comes from the preset."""
    wildcard: bool = False
    """Whether the source was written as `"*"`."""


class ResolvedMachine(Struct, frozen=True, kw_only=True):
    """A machine merged with its preset, with every transition expanded."""

    initial: str
    states: dict[str, StateSpec]
    transitions: list[ResolvedTransition]
    """In the order in which they are tried."""

    @property
    def final(self) -> frozenset[str]:
        """States in which an episode ends."""
        return frozenset(name for name, state in self.states.items() if state.final)

    def leaving(self, source: str, trigger: str | None = None) -> list[ResolvedTransition]:
        """Return the transitions out of a state, for one event or all, in the order in which they are tried."""
        return [t for t in self.transitions if t.source == source and trigger in (None, t.trigger)]


class Machine:
    """The machine of all episodes of one spec.

        machine = Machine(resolved_machine(spec))
        machine.next("GENERATING", "answered", episode.guard_values)     # "AWAITING_USER_FEEDBACK"

    Raises:
        SpecError: a transition or `initial` names a state that does not exist.
        GuardError: a condition is not valid CEL.
    """

    def __init__(self, resolved: ResolvedMachine) -> None:
        import transitions  # where a spec is only checked, nothing is driven

        self.resolved = resolved
        self.initial = resolved.initial
        self.states = resolved.states
        self.final = resolved.final
        if problems := unknown_states(resolved):
            raise SpecError(problems)
        guards = {text: Guard(text) for t in resolved.transitions if (text := t.conditions) is not None}
        self._events = transitions.Machine(
            model=None,
            states=list(resolved.states),
            initial=resolved.initial,
            transitions=[
                {
                    "trigger": t.trigger,
                    "source": t.source,
                    "dest": t.dest,
                    "conditions": None if t.conditions is None else partial(_holds, guards[t.conditions], t),
                }
                for t in resolved.transitions
            ],
            auto_transitions=False,
        ).events
        first = {(t.source, t.trigger): t for t in reversed(resolved.transitions)}
        self.settled = {place: t.dest for place, t in first.items() if t.conditions is None}
        """(state, event) -> next state, where no condition is asked."""

    def next(self, state: str, event: str, context: ReadContext) -> str:
        """Return the next state: the destination of the first transition whose condition holds.

        `context` is called for each guard that is evaluated, with the names of the variables that it reads. Raises
        EngineError (kind `unhandled_event`) if there is no such transition, and GuardError if a condition has no result
        for these values.
        """
        settled = self.settled.get((state, event))
        if settled is not None:
            return settled
        leaving = self.resolved.leaving(state, event)
        if not leaving:
            handled = ", ".join(f"`{name}`" for name in dict.fromkeys(t.trigger for t in self.resolved.leaving(state)))
            raise EngineError(
                f"{state} does not handle `{event}`; it handles {handled or 'no event'}. "
                f"Add a transition with trigger `{event}` and source {state}",
                kind="unhandled_event",
                blame="spec",
            )
        step = SimpleNamespace(state=state)
        if not self._events[event].trigger(step, context):
            tried = "`, `".join(t.conditions or "" for t in leaving)
            raise EngineError(
                f"`{event}` in {state}: no condition of its transitions holds (`{tried}`); "
                f"add a last one for `{event}` without `conditions`",
                kind="unhandled_event",
                blame="spec",
            )
        return str(step.state)


def _holds(guard: Guard, transition: ResolvedTransition, context: ReadContext) -> bool:
    try:
        return guard.evaluate(context(guard.names))
    except GuardError as error:
        raise GuardError(f"{transition.source} --{transition.trigger}--> {transition.dest}: {error}") from error


def unknown_states(machine: ResolvedMachine) -> list[Diagnostic]:
    """Return a diagnostic for each name that is not a state of the machine; without positions in a file."""
    asked: dict[tuple[str, DataPath], None] = {(machine.initial, ("machine", "initial")): None}
    for t in machine.transitions:
        place: DataPath = ("machine",) if t.index is None else ("machine", "transitions", t.index)
        asked[t.source, (*place, "source")] = None
        asked[t.dest, (*place, "dest")] = None
    states = list(machine.states)
    return [
        Diagnostic(
            "machine.unknown-state", "error", f"there is no state `{name}`", near_or_known(name, states), None, path
        )
        for name, path in asked
        if name not in machine.states
    ]


def resolved_machine(spec: EpisodeSpec) -> ResolvedMachine:
    """Resolve a spec's machine, with the states that sections of plugins ask for."""
    machine = resolve_machine(spec.machine)
    for facts in written_actions(spec):
        if facts.rewrites_machine:
            machine = load(facts.rewrites_machine)(spec, machine)
    return machine


def resolve_machine(machine: MachineSpec) -> ResolvedMachine:
    """Merge a machine with its preset, and expand every transition.

    The spec's states are added to those of the preset and replace states of the same name. Its transitions are tried
    first. A transition of the preset that can never be taken (an unconditional one precedes it, or its source is now
    final) is left out. `limit` and `failed` lead to the final state, if there is one alone, where no other transition
    says so. Names are not checked: a transition may name a state that does not exist.
    """
    preset = PRESETS[machine.preset].machine if machine.preset is not None else None
    states = {**(preset.states if preset else {}), **machine.states}
    initial = machine.initial or (preset.initial if preset else None)
    assert initial is not None  # MachineSpec validates this
    standing = [name for name, state in states.items() if not state.final]
    transitions = [t for index, spec in enumerate(machine.transitions) for t in _spell_out(spec, standing, index)]
    settled = {(t.source, t.trigger) for t in transitions if t.conditions is None}
    for spec in preset.transitions if preset else ():
        added = [
            t for t in _spell_out(spec, standing, None) if t.source in standing and (t.source, t.trigger) not in settled
        ]
        transitions += added
        settled |= {(t.source, t.trigger) for t in added if t.conditions is None}
    final = [name for name, state in states.items() if state.final]
    if len(final) == 1:
        cut_short = _spell_out(TransitionSpec(trigger=list(ALWAYS), source=ANY, dest=final[0]), standing, None)
        transitions += [t for t in cut_short if (t.source, t.trigger) not in settled]
    return ResolvedMachine(initial=initial, states=states, transitions=transitions)


def _spell_out(spec: TransitionSpec, standing: list[str], index: int | None) -> list[ResolvedTransition]:
    """One transition for each source and trigger, each named once."""
    pairs: dict[tuple[str, str], bool] = {}
    guard = spec.guard
    for written in spec.sources:
        for source in standing if written == ANY else [written]:
            for trigger in spec.triggers:
                pairs.setdefault((source, trigger), written == ANY)
    return [
        ResolvedTransition(
            trigger=trigger,
            source=source,
            dest=source if spec.dest == SAME else spec.dest,
            conditions=guard,
            index=index,
            wildcard=wildcard,
        )
        for (source, trigger), wildcard in pairs.items()
    ]
