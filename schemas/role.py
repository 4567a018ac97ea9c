"""The simulated user and the scorer: code of one's own, or a model that plays the role."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.schemas.backend import BackendSpec
from engine.schemas.base import Contract, Seconds
from engine.schemas.entry import Effects, Entry, IsolationSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.model import ModelSpec
from engine.schemas.reward import RewardEvent


class RoleMessage(Contract):
    """One message of the prompt of a model that plays the user or the judge. `{{field}}` is filled in."""

    role: Literal["system", "user", "assistant"]
    content: str


class RoleSpec(Contract):
    """What the user and the scorer share: code by entry point, or a model that plays the role."""

    PLAYER: ClassVar[str] = ""
    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"player": "players"}

    use: str | None = Field(default=None, min_length=1)
    """`package.module:Name`, or a name that an installed package offers; not set for a model-played role."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """With `use`: keyword arguments of its constructor."""
    timeout: Seconds | None = None
    """Deadline for one answer. Default: 1m with `use`, 10m for a model."""
    model: ModelSpec | None = None
    """Which model plays, and how conversations become its tokens; the policy's own when left out."""
    backend: BackendSpec | None = None
    """Where it runs. Left out: in the policy's backend, where the weights are the same; else transformers in this
    process."""
    weights: Literal["frozen", "policy"] = "frozen"
    """Weights of the model during a training of the same model. `frozen`: those that the training starts from (with
    LoRA: the base model), so that rewards do not drift with the policy. `policy`: the newest weights of the policy."""
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """Sampling parameters of the role's model. Its replies are never trained on."""
    prompt: list[RoleMessage] = Field(default_factory=list)
    """The prompt of the model that plays the role. `{{task.question}}` is a field of the task; `{{reply}}` the policy's
    newest reply."""
    turn_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of one answer of a model, including reasoning."""
    isolation: IsolationSpec | None = None
    """Where the code of `use`, or of a model's `grader`, runs; the spec's `isolation` when left out."""

    @property
    def model_played(self) -> bool:
        """Whether a model plays the role."""
        return self.use is None

    @property
    def player(self) -> str:
        """The name of what lets a model play it, in the point `players`; empty if it is code."""
        return self.PLAYER if self.model_played else ""

    @property
    def seconds(self) -> float:
        """Deadline for one answer, in seconds."""
        return self.timeout or (600.0 if self.model_played else 60.0)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        """By entry point or played: never both, and no key of the one beside the other."""
        if self.use is None:
            if not self.prompt:
                raise ValueError(
                    "it needs `use` (an entry point), or `prompt` (what a model that plays the part is told)"
                )
            if self.with_:
                raise ValueError("`with` belongs to `use`; a model that plays the part takes none")
            return self
        apart = {"use", "with_", "timeout", "effects", "isolation"}
        # A stored spec says every default: what is as it would be anyway is not stray.
        stray = [
            name
            for name, info in type(self).model_fields.items()
            if name in self.model_fields_set - apart
            and getattr(self, name) != info.get_default(call_default_factory=True, validated_data={})
        ]
        if stray:
            named = " and ".join(f"`{name}`" for name in stray)
            raise ValueError(
                f"{named} {'is' if len(stray) == 1 else 'are'} for a part that a model plays; this one has `use`"
            )
        return self


class Mark(Contract):
    """A text with which a model-played user signals the engine; it is removed from the message that the policy sees."""

    text: str | None = Field(default=None, min_length=1)
    """The text of the mark, anywhere in the reply."""
    pattern: str | None = Field(default=None, min_length=1)
    """Instead of `text`: a regular expression that finds the mark."""
    satisfied: bool = False
    """The mark ends the conversation."""
    solved: bool = False
    """The mark says that the task is solved."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    """The rewards that the mark writes."""
    reward: str | None = Field(default=None, min_length=1)
    """Name of a reward whose value is the number in the pattern's first group."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Values of the mark that guards read as `feedback.<name>` and `facts.<name>`."""

    @model_validator(mode="after")
    def _whole(self) -> Mark:
        if (self.text is None) == (self.pattern is None):
            raise ValueError("a mark needs exactly one of `text` and `pattern`")
        groups = _groups(self.pattern) if self.pattern is not None else 0
        if self.reward is not None and not groups:
            raise ValueError("`reward` needs a `pattern` with a group, such as `SCORE=([0-9.]+)`")
        return self


def _groups(pattern: str) -> int:
    """How many groups a regular expression has."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"the pattern is not a valid regular expression: {error}") from error


class ModelUserLimits(Contract):
    """What a user that a model plays may cost in one episode, beside `limits` of the spec. Time is its `timeout`."""

    turns: int | None = Field(default=None, ge=1)
    """Answers."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens that it samples in one episode; checked before each answer."""


class UserSpec(RoleSpec):
    """The simulated user: `use` names a class of one's own, `prompt` has a model play it."""

    PLAYER: ClassVar[str] = "user"

    effects: Effects = "pure"
    opener: str = "Hello. How can I help you?"
    """What the policy is taken to have said first, where the dialogue follows the prompt with its roles changed
    over."""
    marks: list[Mark] = Field(default_factory=list)
    """Texts with which the model ends the conversation, says that the task is solved, or gives rewards."""
    limits: ModelUserLimits = Field(default_factory=ModelUserLimits)
    """Limits on the model that plays the user."""
    grader: Entry | None = None
    """A user by entry point that judges first: its rewards, facts, `solved` and `satisfied` stand, and the model only
    finds the words. Its own words are `{{verdict}}` in the prompt."""


class ScorerSpec(RoleSpec):
    """The last word on an episode's rewards: a function, or a model as judge. Both read assistant messages alone."""

    PLAYER: ClassVar[str] = "scorer"

    use: str | None = Field(default=None, min_length=1)
    """`math-verify`, or `package.module:callable(view) -> list[RewardEvent]`; left out where a model judges."""
    name: str = Field(default="judge", min_length=1)
    """Name of the judge's reward."""
    pattern: str = Field(default=r"(?i)\bscore\W*(-?\d+(?:\.\d+)?)", min_length=1)
    """Regular expression whose first group is the judge's number, where it stands last in the reply."""
    scale: list[float] = Field(default_factory=lambda: [0.0, 1.0], min_length=2, max_length=2)
    """Lowest and highest number of the judge; the reward is scaled to [0, 1]."""
    turns: Literal["last", "each"] = "last"
    """Whether the episode's last reply is judged, or each of them."""
    tries: int = Field(default=2, ge=1)
    """Maximum number of replies of the judge until one has a number on the scale."""

    @model_validator(mode="after")
    def _readable(self) -> ScorerSpec:
        if not _groups(self.pattern):
            raise ValueError(r"`pattern` needs a group that holds the number, such as `Score: (\d+)`")
        if not self.scale[0] < self.scale[1]:
            raise ValueError("`scale` runs from a lower to a higher number, such as [0, 10]")
        return self
