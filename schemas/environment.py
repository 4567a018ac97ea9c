"""The interfaces of environments, tools and simulated users.

Every method may be plain or `async`. Plain methods run in a thread, so a slow one delays no other episode.
Each call has a deadline. Their answers are journaled; an exception becomes a typed failure
of their own episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from pydantic import Field

from engine.schemas.base import Contract, Struct
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
    """The name of its user among the spec's `users`."""


class EpisodeView(Struct, frozen=True, kw_only=True):
    """A read-only view of an episode for environments, tools and users; the same object for every call of a turn."""

    episode_id: str
    task: Task
    seed: int
    """The episode's seed, in [0, 2**63)."""
    messages: Sequence[Message]
    """All messages so far, including the prompt."""
    turn: int
    """The newest assistant turn, from 0; -1 before the first."""
    user_turn: int
    """Number of user turns so far."""
    calls: Sequence[ToolCall]
    """Tool calls of the newest assistant turn."""
    malformed: Sequence[MalformedCall]
    """Tool calls of the newest assistant turn that could not be parsed."""
    finish: str
    """How the newest assistant turn ended: `stop`, `length` or `abort`; empty before the first."""
    facts: Mapping[str, Any]
    """The facts that environment, tools and user have returned so far."""
    rewards: Sequence[float]
    """The reward of each assistant turn so far, summed over all names."""
    written: str = ""
    """The newest reply as it was sampled, with calls and reasoning, without the token that ended it. Only for adapters
    whose library reads replies so; empty for others."""
    blocks: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Original texts of the condensed blocks, by number."""

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
    """The answer of an environment to `reset`."""

    messages: list[Message] = Field(default_factory=list)
    """Messages after the spec's `prompt`, before the first turn."""
    facts: dict[str, Any] = Field(default_factory=dict)


class Step(Contract):
    """The answer of an environment to `step`, or of a custom action to its call."""

    event: str
    """One of the events that the action declares."""
    messages: list[Message] = Field(default_factory=list)
    """Messages that the model sees next; never of role `assistant`."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


class UserTurn(Contract):
    """The answer of a (simulated) user."""

    content: str | list[ContentPart] = ""
    """The message that the model sees. Required unless `satisfied`."""
    satisfied: bool = False
    """Whether the user ends the conversation."""
    solved: bool = False
    """Whether the task is solved at this turn; guards read it as `feedback.solved`."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    """Rewards for this and, by address, for earlier turns: a user may reassign them."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Values that guards read as `feedback.<name>` and `facts.<name>`."""
    tokens: int = 0
    """Number of tokens that a model-played user sampled; they are never trained on."""
    recover: Literal["wrong", "no_answer"] | None = None
    """The kind of problem of the reply: if the spec has a text `recover.<this>`, the model sees that text instead of
    `content`."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Values of the `{{fields}}` of that text."""


def action(*events: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function as a custom action, with the events that it may return.

        @action("condensed")
        def condense(view: EpisodeView, keep: int = 2) -> Step: ...

    A state names it by entry point; the state's `with` are its keyword arguments.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.events = events  # type: ignore[attr-defined]
        return function

    return mark


class ToolReply(Contract):
    """The answer of a tool that writes rewards or facts, or returns images; other tools return a plain value."""

    content: str | list[ContentPart]
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


class ProgramSettings(Contract):
    """What an environment adds to the agent program of its episode (`agent.run`)."""

    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the program, instead of those of the same name in `agent.env`."""
    seconds: float | None = None
    """Its time, where that is shorter than `agent.timeout`."""


@runtime_checkable
class Environment(Protocol):
    """The environment of one episode. A new object is built for each episode.

    `step(view) -> Step`, `score(view) -> list[RewardEvent]`, `tools() -> list[callable]`, `program() ->
    ProgramSettings` and `close()` are optional: an environment that has them is asked.
    """

    def reset(self, task: Task, seed: int) -> Reset | Awaitable[Reset]:
        """Begin an episode. The same task and seed must give the same answer."""
        ...


@runtime_checkable
class User(Protocol):
    """A simulated user. A new object is built for each episode. `close()` is optional.

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
