"""Journal records: everything that the spec and the seed do not determine.

An action has two halves. `perform` does the I/O and returns a record; `apply` applies the record
to the episode, and is pure. The record is stored, so a trace, a resume, a replay and a
fork use one mechanism: they apply the records again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import msgspec

from engine import plugin
from engine.schemas.base import Struct
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.generation import Generation
from engine.schemas.message import Message, ToolResult
from engine.schemas.reward import RewardEvent
from engine.schemas.sections import OneOf
from engine.schemas.trajectory import Blame, Failure


class RecordBase(Struct, frozen=True, kw_only=True):
    """The base class of all records."""

    blame: ClassVar[Blame] = "environment"
    """The blame if the record has a value that cannot be stored."""

    if TYPE_CHECKING:
        kind: str

    unrepeated: ClassVar[tuple[str, ...]] = ()
    """Fields that may differ when the action is performed again for a resume."""

    def words(self) -> str:
        """Describe it in a few words, for `engine show`, which describes the core's records itself."""
        return ""

    def summary(self) -> dict[str, Any]:
        """What `engine show --json` and `engine view` show of it besides its messages; empty for the core's records."""
        return {}

    def said(self) -> Sequence[Message]:
        """The messages in it, other than the model's."""
        return ()

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages, one for each of `said`."""
        assert not messages, f"`{type(self).__name__}` has no messages"
        return self

    def answers(self) -> Mapping[str, Any] | None:
        """Return the free-form JSON values that code outside the engine returned, by their place; None if there are
        none.

        A record with answers is validated once more when it is stored, and the episode goes on with what a reader would
        get.
        """
        return None


_EMPTY = Reset()


def arguments_of(messages: list[Message]) -> dict[str, Any]:
    """Arguments of the calls in worked examples, by their place."""
    return {
        f"messages[{at}].{call.name}": call.arguments
        for at, message in enumerate(messages)
        for call in message.tool_calls
    }


class ResetRecord(RecordBase, frozen=True, kw_only=True):
    """The environment began."""

    kind: Literal["reset"] = "reset"
    reset: Reset
    prompt: list[Message] | None = None
    """What the spec's prompt says, where it holds images; None where spec and task alone determine it."""

    def said(self) -> Sequence[Message]:
        """The messages of the prompt, and those of the environment."""
        return [*(self.prompt or ()), *self.reset.messages]

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages."""
        first = len(self.prompt or ())
        prompt = self.prompt if self.prompt is None else [*messages[:first]]
        return replace(self, prompt=prompt, reset=self.reset.model_copy(update={"messages": [*messages[first:]]}))

    def answers(self) -> Mapping[str, Any] | None:
        """Facts, and arguments in worked examples; None where no code outside the engine was asked."""
        if self.prompt is None and self.reset == _EMPTY:
            return None
        return {"facts": self.reset.facts} | arguments_of(self.reset.messages)


class GenerationRecord(RecordBase, frozen=True, kw_only=True):
    """The model replied."""

    blame: ClassVar[Blame] = "backend"
    kind: Literal["generation"] = "generation"
    generation: Generation
    whole: bool = False
    """Whether the bridge before it was found by rendering the whole conversation, because the chat template is not
    trusted otherwise."""


class ToolsRecord(RecordBase, frozen=True, kw_only=True):
    """Tools answered, in the order of the calls."""

    blame: ClassVar[Blame] = "tool"
    kind: Literal["tools"] = "tools"
    results: list[ToolResult]

    def said(self) -> Sequence[Message]:
        """The results as messages."""
        return [
            Message(role="tool", content=result.content, tool_call_id=result.call_id, name=result.name)
            for result in self.results
        ]

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with the contents of other messages."""
        pairs = zip(self.results, messages, strict=True)
        return replace(self, results=[replace(result, content=message.content) for result, message in pairs])

    def answers(self) -> Mapping[str, Any]:
        """Facts."""
        return {f"results[{at}].facts": result.facts for at, result in enumerate(self.results)}


class UserRecord(RecordBase, frozen=True, kw_only=True):
    """The user answered."""

    blame: ClassVar[Blame] = "user"
    kind: Literal["user"] = "user"
    turn: UserTurn
    canned: bool = False
    """Whether the engine answered in the user's place (to a malformed call)."""

    def said(self) -> Sequence[Message]:
        """The user's message, unless the user said nothing."""
        return [Message(role="user", content=self.turn.content)] if self.turn.content else []

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with the content of another message."""
        (message,) = messages
        return replace(self, turn=self.turn.model_copy(update={"content": message.content}))

    def answers(self) -> Mapping[str, Any]:
        """Facts, and fields of templates."""
        return {"facts": self.turn.facts, "fields": self.turn.fields}


class StepRecord(RecordBase, frozen=True, kw_only=True):
    """The environment's `step`, or a custom action, answered."""

    kind: Literal["step"] = "step"
    step: Step

    def said(self) -> Sequence[Message]:
        """The environment's messages."""
        return self.step.messages

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages."""
        return replace(self, step=self.step.model_copy(update={"messages": [*messages]}))

    def answers(self) -> Mapping[str, Any]:
        """Facts, and arguments in worked examples."""
        return {"facts": self.step.facts} | arguments_of(self.step.messages)


class ScoreRecord(RecordBase, frozen=True, kw_only=True):
    """The final scorer answered."""

    kind: Literal["score"] = "score"
    rewards: list[RewardEvent]
    replies: list[str] = msgspec.field(default_factory=list)
    """What a judge that a model plays said: one reply for each turn that it judged, in order."""

    def answers(self) -> Mapping[str, Any] | None:
        """No value of any form: the rewards, if there are any, are validated."""
        return {} if self.rewards or self.replies else None


class LimitRecord(RecordBase, frozen=True, kw_only=True):
    """A limit was reached: before an action began or, for `episode_seconds`, while it waited."""

    kind: Literal["limit"] = "limit"
    limit: str
    value: float
    """The count that was reached."""
    began: bool = False
    """Whether the action had begun: the episode's time ended before it had a result."""
    overflow: bool = False
    """Whether the state handles the event `overflow`, so that the episode makes room and goes on."""


class FailureRecord(RecordBase, frozen=True, kw_only=True):
    """An action failed."""

    kind: Literal["failure"] = "failure"
    failure: Failure
    built: bool = True
    """False where the episode's objects could not be built: it has no environment, user and tools from then on."""


class UnreadRecord(RecordBase, frozen=True, kw_only=True):
    """A record of a plugin that is not installed. It can be shown, not applied."""

    kind: str
    data: dict[str, Any]
    """The stored record."""

    def words(self) -> str:
        """Which plugin is missing."""
        return plugin.missing("records", self.kind) or "no installed plugin knows this record"


_RECORDS: OneOf[RecordBase] = OneOf(
    point="records",
    core=(
        ResetRecord,
        GenerationRecord,
        ToolsRecord,
        UserRecord,
        StepRecord,
        ScoreRecord,
        LimitRecord,
        FailureRecord,
    ),
)
Record = Annotated[RecordBase, _RECORDS]
"""A record of any kind."""


@cache
def record_kinds() -> frozenset[str]:
    """The kinds of records that can be read."""
    return _RECORDS.tags()


class JournalEntry(Struct, frozen=True, kw_only=True):
    """One step of an episode: a record, its event and the next state."""

    seq: int
    """Position in the episode's journal, from 0."""
    state: str
    """The state of the episode before this step."""
    event: str
    """The event of the record; empty in a final state."""
    dest: str
    """The state to which the event led."""
    record: Record
    at: float
    """Unix time at which the action began."""
    seconds: float
    """Wall time of the action."""
