"""The preset machines, and how a spec's machine is merged with its preset.

Invariant: a resolved machine is equivalent to the spec's machine, with one transition for each (source, trigger), in the order
in which they are tried. Each transition knows the index of the spec's transition that it came from, so that findings have a
position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.plugin import load
from engine.schemas.machine import MachineSpec, Preset, StateSpec, TransitionSpec
from engine.schemas.sections import written_entries

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec

ANY = "*"
"""The source of a transition that applies in every state that is not final."""

_PENDING = {"PENDING": StateSpec(action="reset")}
_GENERATING = {"GENERATING": StateSpec(action="generate")}
_AWAITING_TOOL = {"AWAITING_TOOL": StateSpec(action="call_tools")}
_AWAITING_USER_FEEDBACK = {"AWAITING_USER_FEEDBACK": StateSpec(action="ask_user")}
_STEPPING = {"STEPPING": StateSpec(action="step")}
_AGENT_RUNNING = {"AGENT_RUNNING": StateSpec(action="run_agent")}
_DONE = {"DONE": StateSpec(action="score", final=True)}

_READY = TransitionSpec(trigger="ready", source="PENDING", dest="GENERATING")
_CUT_SHORT = TransitionSpec(trigger=["limit", "failed", "truncated", "aborted"], source=ANY, dest="DONE")
"""A reply that was cut off ends the episode, unless a transition before this one sends it to be judged."""

_STEPPED = (
    TransitionSpec(trigger="continue", source="STEPPING", dest="GENERATING"),
    TransitionSpec(trigger=["done", "truncated"], source="STEPPING", dest="DONE"),
)

_USER_WAITS = "turns.user < limits.user_turns"
"""Whether the user may still answer. If not, an answer of the model ends the episode, without the event `limit`."""

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
    "step": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _STEPPING | _DONE,
        transitions=[
            _READY,
            TransitionSpec(
                trigger=["answered", "tool_calls", "malformed", "truncated"], source="GENERATING", dest="STEPPING"
            ),
            *_STEPPED,
            _CUT_SHORT,
        ],
    ),
    "tools_and_step": MachineSpec(
        initial="PENDING",
        states=_PENDING | _GENERATING | _AWAITING_TOOL | _STEPPING | _DONE,
        transitions=[
            _READY,
            TransitionSpec(trigger=["tool_calls", "malformed"], source="GENERATING", dest="AWAITING_TOOL"),
            TransitionSpec(trigger=["answered", "truncated"], source="GENERATING", dest="STEPPING"),
            TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
            *_STEPPED,
            _CUT_SHORT,
        ],
    ),
    "agent": MachineSpec(
        initial="PENDING",
        states=_PENDING | _AGENT_RUNNING | _GENERATING | _DONE,
        transitions=[
            TransitionSpec(trigger="ready", source="PENDING", dest="AGENT_RUNNING"),
            TransitionSpec(trigger="request", source="AGENT_RUNNING", dest="GENERATING"),
            TransitionSpec(trigger=["exited", "died", "timeout"], source="AGENT_RUNNING", dest="DONE"),
            TransitionSpec(
                trigger=["answered", "tool_calls", "malformed", "truncated"], source="GENERATING", dest="AGENT_RUNNING"
            ),
            _CUT_SHORT,
        ],
    ),
}
"""Each handles all events of its actions, `limit` and `failed`, with an unconditional last transition."""

ABOUT: Mapping[Preset, str] = {
    "single_turn": "One reply.",
    "tools": "Replies and tool results, until a reply calls no tool.",
    "tools_and_user": "The user answers each reply that calls no tool, until satisfied or out of turns.",
    "retry_with_feedback": "The same without tools.",
    "step": "The environment's `step` answers each reply, until its event is `done` (or `truncated`, a limit of its own).",
    "tools_and_step": "The same for each reply that calls no tool; the engine runs tool calls.",
    "agent": "The program of `agent` runs, and each of its requests to the model API is a turn, until it ends.",
}
"""A description of each preset, for docs/spec.md."""


@dataclass(frozen=True, slots=True)
class ResolvedTransition:
    """The destination of one event in one state, if its condition holds."""

    trigger: str
    source: str
    dest: str
    conditions: str | None = None
    """One CEL expression; None: always."""
    index: int | None = None
    """Index in the spec's `machine.transitions`; None if it comes from the preset."""
    wildcard: bool = False
    """Whether the source was written as `"*"`."""


@dataclass(frozen=True)
class ResolvedMachine:
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


def machine_of(spec: EpisodeSpec) -> ResolvedMachine:
    """Resolve a spec's machine, with the states that sections of plugins ask for."""
    machine = resolve_machine(spec.machine)
    for facts in written_entries(spec, "actions"):
        if facts.rewrites_machine:
            machine = load(facts.rewrites_machine)(spec, machine)
    return machine


def resolve_machine(machine: MachineSpec) -> ResolvedMachine:
    """Merge a machine with its preset, and expand every transition.

    The spec's states are added to those of the preset and replace states of the same name. Its transitions are tried
    first. A transition of the preset that can never be taken (an unconditional one precedes it, or its source is now final)
    is left out. Names are not checked: a transition may name a state that does not exist.
    """
    preset = PRESETS[machine.preset] if machine.preset is not None else None
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
