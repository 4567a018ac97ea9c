"""Limits on an episode: what people write under `limits`, validated, and what a row of the table `engine.limits` says
of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from engine.schemas.base import Seconds
from engine.schemas.sections import SectionOwner

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.role import UserSpec


class LimitsSpec(SectionOwner):
    """Limits on one episode. They are checked before each action, in the order of these fields."""

    OWNER: ClassVar[str] = "limits"

    episode_seconds: Seconds | None = 600.0
    """Wall time of the whole episode."""
    assistant_turns: int | None = Field(default=8, ge=1)
    """Maximum number of turns of the model."""
    images: int | None = Field(default=None, ge=1)
    """Maximum number of images in the conversation when the model is called."""
    episode_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the current branch: prompt, replies, and the closing tokens and messages between them. A reply is cut
    at exactly this length. The model's context when left out."""
    turn_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens that the model samples in one turn."""
    tool_calls: int | None = Field(default=16, ge=1)
    """Maximum number of tool calls. Further calls in the same turn get an error result."""
    user_turns: int | None = Field(default=8, ge=1)
    """Maximum number of answers of the user."""
    tool_seconds: Seconds = 30.0
    """Deadline for one tool call."""
    tool_result_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one tool's result, and of each text of an environment or a user. Of a longer text, a part is left
    out."""
    tool_result_keep: Literal["start", "end", "both"] = "both"
    """Which part of a long text is shown: its start, its end, or as much of both."""
    tool_result_mark: str = "\n[… {{characters}} characters left out …]\n"
    """What stands in the place of what is left out; `{{characters}}` is how much that is. Its tokens count too."""

    @property
    def tokens_per_episode(self) -> int | None:
        """The longest possible episode: `episode_tokens`, else `assistant_turns` × `turn_tokens`, else None."""
        if self.episode_tokens is not None or self.assistant_turns is None:
            return self.episode_tokens
        return self.assistant_turns * self.turn_tokens


LIMIT = "limit"
"""The event of a state whose action did not start because a limit was reached."""
OVERFLOW = "overflow"
"""The event of `generate` before a prompt that leaves no room for a reply, in states that have a transition for it."""
FAILED = "failed"
"""The event of a state whose action failed."""
ALWAYS: tuple[str, ...] = (LIMIT, FAILED)
"""Events that may occur in every state except final ones."""

UNBOUNDED = 2**53 - 1
"""What a guard reads for a limit that is not set: the largest integer that a double holds exactly."""
MAX_STEPS = 100_000
"""Steps of an episode after which the executor stops it, whatever its machine and its limits say."""

Owner = Literal["limits", "model", "user"]
"""Which part of the spec sets a limit: `limits`, `model` or the `limits` of a user."""


class Limit(msgspec.Struct, frozen=True):
    """One limit. It stops its action before that begins, unless `cuts` says otherwise."""

    name: str
    """Its name in records and outcomes; of the owner `limits`, also its field of `LimitsSpec`."""
    unit: str
    """What it counts: `turns`, `tokens`, `seconds`, …"""
    counted: str
    """What is counted, for guards' variables and the docs."""
    action: str | None = None
    """The action that it stops; None: the action of every state that is not final."""
    count: Callable[[Episode], int] | None = None
    """The count so far. None for time, which the executor measures, and for what is cut."""
    per_use: Literal["one", "calls"] | None = None
    """How much a use of the action adds, which makes the count provable: one, or as many as the newest reply's tool
    calls.
    None: the count does not follow from which actions ran, so proofs assume that the limit may be reached at any
    time."""
    variable: str | None = None
    """The guard variable that holds the count."""
    budget: str | None = None
    """Its name in `engine validate --budget`."""
    owner: Owner = "limits"
    inclusive: bool = False
    """Whether the count may equal the limit; otherwise reaching the limit stops the action."""
    always: bool = False
    """Whether it holds even if the spec does not set it."""
    cuts: str = ""
    """What it ends, if it does not stop an action."""
    examples: tuple[Any, ...] = ()
    """Values that an editor proposes."""

    @property
    def key(self) -> str:
        """Its key in the spec, for docs."""
        last = self.name.rpartition(".")[2]
        return {"limits": f"limits.{last}", "model": f"model.{last}", "user": f"user.limits.{last}"}[self.owner]

    def value(self, spec: EpisodeSpec, user: UserSpec | None = None) -> float | None:
        """The limit that a spec sets; None if it sets none.

        Args:
            spec: The spec.
            user: The episode's user, whose own limits apply.
        """
        key = self.name.rpartition(".")[2]
        if self.owner == "limits":
            value: float | None = spec.limits.value_of(key)
            return value
        part = spec.model if self.owner == "model" else user and user.limits
        return getattr(part, key, None)

    def may_stop(self, spec: EpisodeSpec) -> bool:
        """Whether it may stop its action in some episode of the spec."""
        users = spec.users_by_name.values() if self.owner == "user" else [None]
        return self.always or any(self.value(spec, user) is not None for user in users)

    def is_reached(self, count: float, limit: float) -> bool:
        """Whether a count stops the action."""
        return count > limit if self.inclusive else count >= limit
