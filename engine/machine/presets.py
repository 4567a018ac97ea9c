"""A table: the preset machines, and what each is for."""

from __future__ import annotations

from collections.abc import Mapping

from engine.schemas.machine import MachineSpec, Preset, StateSpec, TransitionSpec

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
