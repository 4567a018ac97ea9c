"""A table: the preset machines, and what each is for. A plugin adds one by the point `presets` of its face."""

from __future__ import annotations

from collections.abc import Mapping

from engine import plugin
from engine.machine.preset import CUT_SHORT, DONE, GENERATING, PENDING, Preset
from engine.schemas.machine import MachineSpec, StateSpec, TransitionSpec

_AWAITING_TOOL = {"AWAITING_TOOL": StateSpec(action="call_tools")}
_AWAITING_USER_FEEDBACK = {"AWAITING_USER_FEEDBACK": StateSpec(action="ask_user")}
_STEPPING = {"STEPPING": StateSpec(action="step")}

_READY = TransitionSpec(trigger="ready", source="PENDING", dest="GENERATING")
_STEPPED = (
    TransitionSpec(trigger="continue", source="STEPPING", dest="GENERATING"),
    TransitionSpec(trigger=["done", "truncated"], source="STEPPING", dest="DONE"),
)

_USER_WAITS = "turns.user < limits.user_turns"
"""Whether the user may still answer. If not, an answer of the model ends the episode, without the event `limit`."""

_CORE: Mapping[str, Preset] = {
    "single_turn": Preset(
        about="One reply.",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | DONE,
            transitions=[
                _READY,
                TransitionSpec(trigger=["answered", "tool_calls", "malformed"], source="GENERATING", dest="DONE"),
                CUT_SHORT,
            ],
        ),
    ),
    "tools": Preset(
        about="Replies and tool results, until a reply calls no tool.",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | _AWAITING_TOOL | DONE,
            transitions=[
                _READY,
                TransitionSpec(trigger=["tool_calls", "malformed"], source="GENERATING", dest="AWAITING_TOOL"),
                TransitionSpec(trigger="answered", source="GENERATING", dest="DONE"),
                TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
                CUT_SHORT,
            ],
        ),
    ),
    "tools_and_user": Preset(
        about="The user answers each reply that calls no tool, until satisfied or out of turns.",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | _AWAITING_TOOL | _AWAITING_USER_FEEDBACK | DONE,
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
                CUT_SHORT,
            ],
        ),
    ),
    "retry_with_feedback": Preset(
        about="The same without tools.",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | _AWAITING_USER_FEEDBACK | DONE,
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
                CUT_SHORT,
            ],
        ),
    ),
    "step": Preset(
        about="The environment's `step` answers each reply, until its event is `done` (or `truncated`, a limit of its "
        "own).",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | _STEPPING | DONE,
            transitions=[
                _READY,
                TransitionSpec(
                    trigger=["answered", "tool_calls", "malformed", "truncated"], source="GENERATING", dest="STEPPING"
                ),
                *_STEPPED,
                CUT_SHORT,
            ],
        ),
    ),
    "tools_and_step": Preset(
        about="The same for each reply that calls no tool; the engine runs tool calls.",
        machine=MachineSpec(
            initial="PENDING",
            states=PENDING | GENERATING | _AWAITING_TOOL | _STEPPING | DONE,
            transitions=[
                _READY,
                TransitionSpec(trigger=["tool_calls", "malformed"], source="GENERATING", dest="AWAITING_TOOL"),
                TransitionSpec(trigger=["answered", "truncated"], source="GENERATING", dest="STEPPING"),
                TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
                *_STEPPED,
                CUT_SHORT,
            ],
        ),
    ),
}

PRESETS: Mapping[str, Preset] = {**_CORE, **plugin.loaded("presets", _CORE, of=Preset)}
"""Every preset by its name."""
