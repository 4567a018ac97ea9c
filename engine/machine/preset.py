"""What a preset machine is, and the states that several share. The table of all is in `engine.machine.presets`; plugins
add to it."""

from __future__ import annotations

from engine.schemas.base import Struct
from engine.schemas.machine import ANY, MachineSpec, StateSpec, TransitionSpec

PENDING = {"PENDING": StateSpec(action="reset")}
GENERATING = {"GENERATING": StateSpec(action="generate")}
DONE = {"DONE": StateSpec(action="score", final=True)}
CUT_SHORT = TransitionSpec(trigger=["limit", "failed", "truncated", "aborted"], source=ANY, dest="DONE")
"""A reply that was cut off ends the episode, unless a transition before this one sends it to be judged."""


class Preset(Struct, frozen=True, kw_only=True):
    """A machine that `machine: NAME` names."""

    machine: MachineSpec
    """Handles all events of its actions, `limit` and `failed`, with an unconditional last transition."""
    about: str
    """What an episode is, for docs/spec.md."""
