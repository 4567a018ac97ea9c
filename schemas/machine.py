"""What people write under `machine`, validated: states, transitions, presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from engine.schemas.base import Contract, Seconds
from engine.schemas.sections import NameOf

ANY = "*"
"""The source of a transition that applies in every state that is not final."""
SAME = "="
"""The destination of a reflexive transition: its source."""


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
    """The state that comes next; `=` is the source itself, whose action is then performed again."""
    conditions: str | list[str] | None = None
    """A CEL expression, or several that must all hold. Without `conditions` and `unless`, the transition is always
    taken."""
    unless: str | list[str] | None = None
    """A CEL expression, or several of which none may hold."""

    @field_validator("dest", mode="before")
    @classmethod
    def _no_internal(cls, dest: Any) -> Any:
        if dest is None:
            raise ValueError(
                "there are no internal transitions, because events come from a state's action alone; write `dest: "
                '"="`, which performs the action again'
            )
        return dest

    @property
    def triggers(self) -> list[str]:
        """The events, as a list."""
        return listed(self.trigger)

    @property
    def sources(self) -> list[str]:
        """The states, as a list."""
        return listed(self.source)

    @property
    def guard(self) -> str | None:
        """`conditions` and `unless` as one CEL expression; None: the transition is always taken."""
        conditions, unless = listed(self.conditions), listed(self.unless)
        if len(conditions) == 1 and not unless:
            return conditions[0]
        parts = [f"({text}\n)" if "//" in text else f"({text})" for text in (*conditions, *unless)]
        signs = [""] * len(conditions) + ["!"] * len(unless)
        return " && ".join(map("".join, zip(signs, parts, strict=True))) or None


def listed(value: str | list[str] | None) -> list[str]:
    """One text, several or none, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


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
