"""Journal records: everything that the spec and the seed do not determine.

An action is two halves. `perform` talks to the world and returns a record; `apply` feeds the record
to the episode, and is pure. The record is what is written down, so a trace, a resume, a replay and a
fork are one thing: apply the records again.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.schemas.base import Contract
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.generation import Generation
from engine.schemas.message import Message, ToolResult
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Failure


class ResetRecord(Contract):
    """The environment began."""

    kind: Literal["reset"] = "reset"
    reset: Reset
    prompt: list[Message] | None = None
    """What the spec's prompt says, where it holds images; None where spec and task alone determine it."""


class GenerationRecord(Contract):
    """The model replied."""

    kind: Literal["generation"] = "generation"
    generation: Generation


class ToolsRecord(Contract):
    """Tools answered, in the order of the calls."""

    kind: Literal["tools"] = "tools"
    results: list[ToolResult]


class UserRecord(Contract):
    """The user answered."""

    kind: Literal["user"] = "user"
    turn: UserTurn
    canned: bool = False
    """True where the engine answered in the user's place (a malformed call)."""


class StepRecord(Contract):
    """The environment's `step`, or a custom action, answered."""

    kind: Literal["step"] = "step"
    step: Step


class ScoreRecord(Contract):
    """The final scorer answered."""

    kind: Literal["score"] = "score"
    rewards: list[RewardEvent]


class LimitRecord(Contract):
    """A limit was met: before an action began or, for `episode_seconds`, while it waited."""

    kind: Literal["limit"] = "limit"
    limit: str
    value: float
    """What had been reached."""
    began: bool = False
    """The action had begun: the episode's time was over before it had an answer."""


class FailureRecord(Contract):
    """An action could not be carried out."""

    kind: Literal["failure"] = "failure"
    failure: Failure
    built: bool = True
    """False where the episode's objects could not be built: it has no environment, user and tools from then on."""


Record = Annotated[
    ResetRecord | GenerationRecord | ToolsRecord | UserRecord | StepRecord | ScoreRecord | LimitRecord | FailureRecord,
    Field(discriminator="kind"),
]


class JournalEntry(Contract):
    """One step of one episode: a record, and where it led."""

    seq: int
    """Position in the episode's journal, from 0."""
    state: str
    """Where the episode stood."""
    event: str
    """What the record meant; empty in a final state."""
    dest: str
    """Where the event led."""
    record: Record
    at: float
    """Unix time at which the action began."""
    seconds: float
    """Wall time of the action."""
