"""The worlds that an episode talks to: environments, tools, simulated users.

Every method may be plain or `async`. Plain ones run in a thread, so a slow one holds up nobody.
Each call has a deadline. What they return is journaled; what they raise becomes a typed failure
of that one episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from engine.schemas.base import Contract
from engine.schemas.message import ContentPart, MalformedCall, Message, ToolCall
from engine.schemas.reward import RewardEvent


class Task(Contract):
    """One row of the task source."""

    id: str
    index: int
    """Position in the source, from 0."""
    fields: dict[str, Any]
    """The row, after `tasks.map`."""
    user: str | None = None
    """Which of the spec's `users` it has."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """What a world may see of an episode: read-only, and the same object for every call of a turn."""

    episode_id: str
    task: Task
    seed: int
    """The episode's seed, in [0, 2**63)."""
    messages: Sequence[Message]
    """Everything said so far, prompt included."""
    turn: int
    """The newest assistant turn, from 0; -1 before the first."""
    user_turn: int
    """How many user turns have been taken."""
    calls: Sequence[ToolCall]
    """Calls of the newest assistant turn."""
    malformed: Sequence[MalformedCall]
    """Attempts at calls in the newest assistant turn that could not be read."""
    finish: str
    """How the newest assistant turn ended: `stop`, `length` or `abort`; empty before the first."""
    facts: Mapping[str, Any]
    """What the worlds have told so far."""
    rewards: Sequence[float]
    """The reward of each assistant turn so far, all names summed."""
    written: str = ""
    """The newest reply as it was sampled, with calls and reasoning, without the token that ended it. Only for adapters whose
    library reads replies so; empty for others."""

    @property
    def reply(self) -> str:
        """Text of the newest assistant message, and of no other role: what a grader may grade."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.text
        return ""

    @property
    def replies(self) -> list[str]:
        """Text of this episode's assistant turns, oldest first (few-shot examples are not turns)."""
        spoken = [message.text for message in self.messages if message.role == "assistant"]
        return spoken[len(spoken) - (self.turn + 1) :]


class Reset(Contract):
    """What an environment answers to `reset`."""

    messages: list[Message] = Field(default_factory=list)
    """Said after the spec's `prompt`, before the first turn."""
    facts: dict[str, Any] = Field(default_factory=dict)


class Step(Contract):
    """What an environment answers to `step`, or a custom action to its call."""

    event: str
    """One of the events that the action declares."""
    messages: list[Message] = Field(default_factory=list)
    """What the model is shown next; never role `assistant`."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


class UserTurn(Contract):
    """What a (simulated) user answers."""

    content: str | list[ContentPart] = ""
    """What the model is shown. Needed unless `satisfied`."""
    satisfied: bool = False
    """The user wants nothing more: the conversation ends."""
    solved: bool = False
    """The task is solved as of this turn; guards read it as `feedback.solved`."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    """Rewards for this and, by address, for earlier turns: a user may reassign them."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """What guards may read as `feedback.<name>` and `facts.<name>`."""
    tokens: int = 0
    """Tokens that a model sampled for it, where a model plays the user; they are never trained."""
    recover: Literal["wrong", "no_answer"] | None = None
    """What is the matter with the reply: the spec's template `recover.<this>`, where it has one, is said instead of `content`."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """What that template's `{{fields}}` are filled with."""


def action(*events: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function as an action of a spec's own, and the events that it may end with.

        @action("condensed")
        def condense(view: EpisodeView, keep: int = 2) -> Step: ...

    A state names it by entry point; the state's `with` are its keyword arguments.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.events = events  # type: ignore[attr-defined]
        return function

    return mark


class ToolReply(Contract):
    """What a tool may return instead of a plain value, to write rewards or facts, or show images."""

    content: str | list[ContentPart]
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """The world of one episode. A fresh object is built for each.

    `step(view) -> Step`, `score(view) -> list[RewardEvent]`, `tools() -> list[callable]` and
    `close()` are optional: an environment that has them is asked.
    """

    def reset(self, task: Task, seed: int) -> Reset | Awaitable[Reset]:
        """Begin: the same task and seed must give the same answer."""
        ...


@runtime_checkable
class User(Protocol):
    """A simulated user. A fresh object is built for each episode. `close()` is optional.

    One that sets `UserTurn.recover` may say so in a class attribute `recover_fields`, such as
    `{"wrong": ("answer", "tries")}`: then `engine validate` checks the spec's templates against it.
    """

    def respond(self, view: EpisodeView) -> UserTurn | Awaitable[UserTurn]:
        """Answer the newest assistant turn."""
        ...


Tool = Callable[..., Any]
"""A typed function. Its signature gives the schema, its docstring the description.

It returns a string, anything that JSON can hold, or a `ToolReply`. A parameter annotated
`EpisodeView` is filled in by the engine and hidden from the model.
"""
