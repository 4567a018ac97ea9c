"""The machines that a spec may begin with, and what a spec's machine comes to.

Invariant: a resolved machine says everything that the spec's machine says and nothing else, one transition for
each (source, trigger), in the order in which they are tried. Each knows the transition of the spec that it came
from, so that whoever finds it wrong can point at a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.schemas.machine import MachineSpec, Preset, StateSpec, TransitionSpec

ANY = "*"
"""As a transition's source: every state that is not final."""

_PENDING = {"PENDING": StateSpec(action="reset")}
_GENERATING = {"GENERATING": StateSpec(action="generate")}
_AWAITING_TOOL = {"AWAITING_TOOL": StateSpec(action="call_tools")}
_AWAITING_USER_FEEDBACK = {"AWAITING_USER_FEEDBACK": StateSpec(action="ask_user")}
_DONE = {"DONE": StateSpec(action="score", final=True)}

_READY = TransitionSpec(trigger="ready", source="PENDING", dest="GENERATING")
_CUT_SHORT = TransitionSpec(trigger=["limit", "failed", "truncated", "aborted"], source=ANY, dest="DONE")
"""A turn that was cut off is no answer: nothing can follow it that the model would have seen coming."""

_USER_WAITS = "turns.user < limits.user_turns"
"""Whether the user may still speak. Where not, an answer ends the episode; that is no limit's doing."""

PRESETS: Mapping[Preset, MachineSpec] = {
    "single_turn": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _DONE,
        transitions=[
            _READY,
            TransitionSpec(trigger=["answered", "tool_calls", "malformed"], source="GENERATING", dest="DONE"),
            _CUT_SHORT,
        ],
    ),
    "tools": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _AWAITING_TOOL | _DONE,
        transitions=[
            _READY,
            TransitionSpec(trigger=["tool_calls", "malformed"], source="GENERATING", dest="AWAITING_TOOL"),
            TransitionSpec(trigger="answered", source="GENERATING", dest="DONE"),
            TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
            _CUT_SHORT,
        ],
    ),
    "tools_and_user": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _AWAITING_TOOL | _AWAITING_USER_FEEDBACK | _DONE,
        transitions=[
            _READY,
            TransitionSpec(trigger="tool_calls", source="GENERATING", dest="AWAITING_TOOL"),
            TransitionSpec(trigger="malformed", source="GENERATING", dest="AWAITING_USER_FEEDBACK"),
            TransitionSpec(
                trigger="answered", source="GENERATING", dest="AWAITING_USER_FEEDBACK", conditions=_USER_WAITS
            ),
            TransitionSpec(trigger="answered", source="GENERATING", dest="DONE"),
            TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
            TransitionSpec(trigger="satisfied", source="AWAITING_USER_FEEDBACK", dest="DONE"),
            TransitionSpec(trigger="feedback", source="AWAITING_USER_FEEDBACK", dest="GENERATING"),
            _CUT_SHORT,
        ],
    ),
    "retry_with_feedback": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _AWAITING_USER_FEEDBACK | _DONE,
        transitions=[
            _READY,
            TransitionSpec(trigger="malformed", source="GENERATING", dest="AWAITING_USER_FEEDBACK"),
            TransitionSpec(
                trigger=["answered", "tool_calls"],
                source="GENERATING",
                dest="AWAITING_USER_FEEDBACK",
                conditions=_USER_WAITS,
            ),
            TransitionSpec(trigger=["answered", "tool_calls"], source="GENERATING", dest="DONE"),
            TransitionSpec(trigger="satisfied", source="AWAITING_USER_FEEDBACK", dest="DONE"),
            TransitionSpec(trigger="feedback", source="AWAITING_USER_FEEDBACK", dest="GENERATING"),
            _CUT_SHORT,
        ],
    ),
}
"""Every event that a state's action declares, `limit` and `failed` are handled, with an unguarded last transition.

`single_turn`: one reply. `tools`: replies and tool results until a reply calls none. `tools_and_user`: a user answers
each reply that calls no tool, until satisfied or out of turns. `retry_with_feedback`: the same without tools.
"""


@dataclass(frozen=True, slots=True)
class ResolvedTransition:
    """Where one event leads from one state, if its condition holds."""

    trigger: str
    source: str
    dest: str
    conditions: str | None = None
    """One CEL expression; None: always."""
    index: int | None = None
    """Which of the spec's own `machine.transitions` it came from; None: the preset's."""
    wildcard: bool = False
    """Whether the source was written as `"*"`."""


@dataclass(frozen=True)
class ResolvedMachine:
    """A machine with its preset merged in and every transition spelt out."""

    initial: str
    states: dict[str, StateSpec]
    transitions: list[ResolvedTransition]
    """In the order in which they are tried."""

    @property
    def final(self) -> frozenset[str]:
        """States in which an episode ends."""
        return frozenset(name for name, state in self.states.items() if state.final)

    def leaving(self, source: str, trigger: str | None = None) -> list[ResolvedTransition]:
        """Transitions out of a state, of one event or of all, in the order in which they are tried."""
        return [t for t in self.transitions if t.source == source and trigger in (None, t.trigger)]


def resolve_machine(machine: MachineSpec) -> ResolvedMachine:
    """Merge the preset in and spell every transition out.

    The spec's states are added to the preset's and replace those of the same name; its transitions are tried
    first. A transition of the preset that can then never be taken (an unguarded one of the spec's comes before it,
    or its source is final now) is left out. Names are not checked here: a transition may lead to a state that is
    not there.
    """
    preset = PRESETS[machine.preset] if machine.preset is not None else None
    states = {**(preset.states if preset else {}), **machine.states}
    initial = machine.initial or (preset.initial if preset else None)
    assert initial is not None  # MachineSpec holds to it
    standing = [name for name, state in states.items() if not state.final]
    transitions = [t for index, spec in enumerate(machine.transitions) for t in _spell_out(spec, standing, index)]
    settled = {(t.source, t.trigger) for t in transitions if t.conditions is None}
    for spec in preset.transitions if preset else ():
        transitions += [
            t for t in _spell_out(spec, standing, None) if t.source in standing and (t.source, t.trigger) not in settled
        ]
    return ResolvedMachine(initial, states, transitions)


def _spell_out(spec: TransitionSpec, standing: list[str], index: int | None) -> list[ResolvedTransition]:
    """One transition for each source and trigger, each named once."""
    pairs: dict[tuple[str, str], bool] = {}
    for written in spec.sources:
        for source in standing if written == ANY else [written]:
            for trigger in spec.triggers:
                pairs.setdefault((source, trigger), written == ANY)
    return [
        ResolvedTransition(trigger, source, spec.dest, spec.conditions, index, wildcard)
        for (source, trigger), wildcard in pairs.items()
    ]
