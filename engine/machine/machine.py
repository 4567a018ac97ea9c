"""A spec's machine as a pure function: (state, event, context) -> state.

Invariant: all episodes of a spec share one `transitions.Machine`, which never changes after it is built. No model is added to
it: each step triggers on a temporary model that contains only the state, so steps of different tasks and threads are
independent. Transitions without conditions are looked up once, when the machine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from transitions import Machine

from engine.errors import EngineError, GuardError, SpecError
from engine.machine.guards import Guard
from engine.machine.presets import ResolvedMachine, ResolvedTransition, resolve_machine
from engine.schemas.machine import MachineSpec
from engine.spec.text.diagnostic import DataPath, Diagnostic

if TYPE_CHECKING:
    from engine.schemas.trajectory import Blame

ReadContext = Callable[[frozenset[str]], Mapping[str, Any]]
"""Builds the requested guard variables, and no others."""


class UnhandledEvent(EngineError):
    """An event occurred in a state that has no transition for it."""

    kind = "unhandled_event"
    blame: Blame = "spec"


class _Step:
    """The temporary model of one step."""

    __slots__ = ("state",)

    def __init__(self, state: str) -> None:
        self.state = state


class EpisodeMachine:
    """The machine of all episodes of one spec.

        machine = EpisodeMachine(machine_of(spec))
        machine.next("GENERATING", "answered", episode.context)     # "AWAITING_USER_FEEDBACK"

    Raises:
        SpecError: a transition or `initial` names a state that does not exist.
        GuardError: a condition is not valid CEL.
    """

    def __init__(self, machine: ResolvedMachine | MachineSpec) -> None:
        resolved = resolve_machine(machine) if isinstance(machine, MachineSpec) else machine
        self.resolved = resolved
        self.initial = resolved.initial
        self.states = resolved.states
        self.final = resolved.final
        problems = unknown_states(resolved)
        if problems:
            raise SpecError(problems)
        guards = {text: Guard(text) for t in resolved.transitions if (text := t.conditions) is not None}
        shared = Machine(
            model=None,
            states=list(resolved.states),
            initial=resolved.initial,
            transitions=[
                {
                    "trigger": t.trigger,
                    "source": t.source,
                    "dest": t.dest,
                    "conditions": None if t.conditions is None else _condition(guards[t.conditions], t),
                }
                for t in resolved.transitions
            ],
            auto_transitions=False,
        )
        self._events = shared.events
        self._settled = {
            (state, name): dest
            for state in resolved.states
            for name in shared.events
            if (dest := self._unconditional(state, name)) is not None
        }
        self._sources = {
            name: frozenset(t.source for t in resolved.transitions if t.trigger == name) for name in shared.events
        }

    def handled(self, state: str) -> list[str]:
        """Return the events for which the state has transitions, in the order in which they are written."""
        return list(dict.fromkeys(t.trigger for t in self.resolved.leaving(state)))

    def next(self, state: str, event: str, context: ReadContext) -> str:
        """Return the next state: the destination of the first transition whose condition holds.

        Args:
            state: The current state.
            event: The event with which its action ended.
            context: Called for each guard that is evaluated, with the names of the variables that it reads.

        Raises:
            UnhandledEvent: the state has no transition for this event, or no condition holds.
            GuardError: a condition has no result for these values.
        """
        settled = self._settled.get((state, event))
        if settled is not None:
            return settled
        if state not in self._sources.get(event, ()):
            raise UnhandledEvent(self._unhandled(state, event))
        step = _Step(state)
        if not self._events[event].trigger(step, context):
            tried = "`, `".join(t.conditions or "" for t in self.resolved.leaving(state, event))
            raise UnhandledEvent(
                f"`{event}` in {state}: no condition of its transitions holds (`{tried}`); "
                f"add a last one for `{event}` without `conditions`"
            )
        return step.state

    def _unconditional(self, state: str, event: str) -> str | None:
        """The next state if it does not depend on a condition; None if it does, or if nothing handles the event."""
        first = next(iter(self.resolved.leaving(state, event)), None)
        if first is None or first.conditions is not None:
            return None
        step = _Step(state)
        self._events[event].trigger(step, None)
        return step.state

    def _unhandled(self, state: str, event: str) -> str:
        known = self.handled(state)
        has = f"it handles {', '.join(f'`{name}`' for name in known)}" if known else "it handles no event"
        return f"{state} does not handle `{event}`; {has}. Add a transition with trigger `{event}` and source {state}"


def _condition(guard: Guard, transition: ResolvedTransition) -> Callable[[ReadContext], bool]:
    names = guard.names
    where = f"{transition.source} --{transition.trigger}--> {transition.dest}"

    def holds(context: ReadContext) -> bool:
        try:
            return guard.evaluate(context(names))
        except GuardError as error:
            raise GuardError(f"{where}: {error}") from error

    return holds


def unknown_states(machine: ResolvedMachine) -> list[Diagnostic]:
    """Return a diagnostic for each name that is not a state of the machine; without positions in a file."""
    asked: dict[tuple[str, DataPath], None] = {(machine.initial, ("machine", "initial")): None}
    for t in machine.transitions:
        place: DataPath = ("machine",) if t.index is None else ("machine", "transitions", t.index)
        asked[t.source, (*place, "source")] = None
        asked[t.dest, (*place, "dest")] = None
    return [
        Diagnostic("machine.unknown-state", "error", f"there is no state `{name}`", _nearest(name, machine), None, path)
        for name, path in asked
        if name not in machine.states
    ]


def _nearest(name: str, machine: ResolvedMachine) -> str:
    near = get_close_matches(name, machine.states, n=1)
    return f"did you mean `{near[0]}`?" if near else f"the states are {', '.join(machine.states)}"
