"""The state machine: states, transitions, presets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract, Seconds


class StateSpec(Contract):
    """One state: what is done in it."""

    action: str | None = None
    """`reset`, `generate`, `call_tools`, `ask_user`, `step`, `score`, or `package.module:action` of your own."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For an action of your own: its keyword arguments."""
    final: bool = False
    """The episode ends here."""
    timeout: Seconds | None = None
    """Deadline for an action of your own."""


class TransitionSpec(Contract):
    """Where an event leads. Of several for one (source, trigger), the first whose condition holds is taken."""

    trigger: str | list[str]
    """The event, or several."""
    source: str | list[str]
    """The state, or several; `"*"` is every state that is not final."""
    dest: str
    conditions: str | None = None
    """One CEL expression; left out, the transition is always taken."""

    @property
    def triggers(self) -> list[str]:
        """The events, as a list."""
        return [self.trigger] if isinstance(self.trigger, str) else list(self.trigger)

    @property
    def sources(self) -> list[str]:
        """The states, as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)


Preset = Literal["single_turn", "tools", "tools_and_user", "retry_with_feedback", "step"]


class MachineSpec(Contract):
    """The state machine: a preset, a preset with changes, or one's own."""

    preset: Preset | None = None
    """Begin with this one; the states below are added, and the transitions below are tried first."""
    initial: str | None = Field(default=None, min_length=1)
    """The first state; the preset's when left out."""
    states: dict[str, StateSpec] = Field(default_factory=dict)
    transitions: list[TransitionSpec] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> MachineSpec:
        if self.preset is None and (not self.states or self.initial is None):
            raise ValueError("a machine needs `preset`, or both `initial` and `states`")
        return self
