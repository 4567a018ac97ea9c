"""What people write under `machine`, validated: states, transitions, presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from engine.schemas.base import Contract, Seconds
from engine.schemas.sections import NameOf


class StateSpec(Contract):
    """A state and its action."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"action": "actions"}

    action: str | None = None
    """`reset`, `generate`, `call_tools`, `ask_user`, `step`, `score`, an action of a plugin, or `package.module:action`
    of your own."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For an action of your own: its keyword arguments."""
    final: bool = False
    """Whether the episode ends in this state."""
    timeout: Seconds | None = None
    """Deadline for an action of your own."""


class TransitionSpec(Contract):
    """A transition. Of several transitions with one (source, trigger), the first whose condition holds is taken."""

    trigger: str | list[str]
    """The event, or several."""
    source: str | list[str]
    """The state, or several; `"*"` is every state that is not final."""
    dest: str
    conditions: str | None = None
    """A CEL expression. Without one, the transition is always taken."""

    @property
    def triggers(self) -> list[str]:
        """The events, as a list."""
        return [self.trigger] if isinstance(self.trigger, str) else list(self.trigger)

    @property
    def sources(self) -> list[str]:
        """The states, as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)


CORE_PRESETS = ("single_turn", "tools", "tools_and_user", "retry_with_feedback", "step", "tools_and_step")
"""The presets of the core, by name."""
PresetName = Annotated[str, NameOf(point="presets", core=CORE_PRESETS)]


class MachineSpec(Contract):
    """The state machine: a preset, a preset with changes, or your own."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"preset": "presets"}

    preset: PresetName | None = None
    """The preset to begin with; the states below are added, and the transitions below are tried first."""
    initial: str | None = Field(default=None, min_length=1)
    """The first state. Default: that of the preset."""
    states: dict[str, StateSpec] = Field(default_factory=dict)
    transitions: list[TransitionSpec] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> MachineSpec:
        if self.preset is None and (not self.states or self.initial is None):
            raise ValueError("a machine needs `preset`, or both `initial` and `states`")
        return self
