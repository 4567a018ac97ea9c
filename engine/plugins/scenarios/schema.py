"""Scenarios, the tests of a spec: scripted episodes and their expected results.

Invariant: a scenario scripts answers, never what the engine does with them. Anything a scenario does not script runs
for
real: the task, the tools, the user, the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract
from engine.schemas.environment import Reset, UserTurn
from engine.schemas.message import ContentPart, Message, Role
from engine.schemas.reward import RewardEvent
from engine.schemas.script import ScriptedReply
from engine.schemas.trajectory import Blame

ANYTHING = "..."
"""Among the expected messages: any number of messages, or none."""


class ScriptedFault(Contract):
    """A failure instead of an answer. At most one of these keys."""

    RENAMED: ClassVar[Mapping[str, str]] = {"nonsense": "invalid"}

    error: str | None = None
    """It raises an exception with this message."""
    timeout: bool = False
    """It does not answer within its deadline. The test does not wait for that time."""
    invalid: bool = False
    """It returns an invalid answer."""

    @property
    def faulty(self) -> bool:
        """Whether it fails."""
        return self.error is not None or self.timeout or self.invalid

    @model_validator(mode="after")
    def _one_fault(self) -> ScriptedFault:
        if (self.error is not None) + self.timeout + self.invalid > 1:
            raise ValueError("only one failure is possible: keep one of `error`, `timeout` and `invalid`")
        return self


class ScriptedResult(ScriptedFault):
    """What a tool answers. The call's arguments are checked against the real tool's schema first."""

    tool: str = Field(min_length=1)
    """The tool's name, as the model knows it."""
    arguments: dict[str, Any] | None = None
    """Only calls whose arguments have these values, after validation; every call when left out."""
    times: int | None = Field(default=None, ge=1)
    """Number of calls that get this result. Default: no limit."""
    result: Any = ""
    """A string, or any JSON value."""
    content: str | list[ContentPart] | None = None
    """Instead of `result`: text and images."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


class ScriptedUserTurn(ScriptedFault, UserTurn):
    """What the user answers. A plain string is `{content: …}`."""

    @model_validator(mode="before")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        return {"content": value} if isinstance(value, str) else value


class ScriptedReset(ScriptedFault, Reset):
    """What the environment answers to `reset`."""


class ScriptedScore(ScriptedFault):
    """What the environment answers to `score`, or the spec's scorer."""

    rewards: list[RewardEvent] = Field(default_factory=list)


class EnvironmentScript(Contract):
    """What the environment answers; what is left out, the real one answers."""

    reset: ScriptedReset | None = None
    score: ScriptedScore | None = None


class ScriptedStep(ScriptedFault):
    """What the environment answers to `step`, or an action of the spec's own to its call."""

    event: str = ""
    """One of the events that the action declares."""
    messages: list[Message] = Field(default_factory=list)
    rewards: list[RewardEvent] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> ScriptedStep:
        if not self.event and not self.faulty:
            raise ValueError("a step needs an `event`, or one of `error`, `timeout` and `invalid`")
        return self


class OutOfTime(Contract):
    """`limits.episode_seconds` is reached when the episode enters a state. A plain string is `{state: …}`."""

    state: str
    visit: int = Field(default=1, ge=1)
    """Which visit to the state, from 1."""

    @model_validator(mode="before")
    @classmethod
    def _plain_state(cls, value: Any) -> Any:
        return {"state": value} if isinstance(value, str) else value


class ExpectedFailure(Contract):
    """The expected failure; keys that are not set are not compared."""

    kind: str | None = None
    blame: Blame | None = None
    state: str | None = None
    """The state in which it failed."""
    turn: int | None = None
    contains: str | None = None
    """A part of its message."""


class ExpectedOutcome(Contract):
    """What must be so of the outcome; what is left out may be anything, but for a failure: none must come unsaid."""

    state: str | None = None
    event: str | None = None
    limit: str | None = None
    """The limit that ended the episode; `null` says that none did."""
    failure: ExpectedFailure | None = None
    solved: bool | None = None
    trainable: bool | None = None
    reward: float | None = None
    """Sum over turns and names, to within 1e-9."""


class ExpectedCall(Contract):
    """One tool call of an assistant message."""

    name: str
    arguments: dict[str, Any] | None = None
    """Exactly these; any when left out."""


class ExpectedMessage(Contract):
    """One message. A plain `...` stands for any number of them: it is `{role: ...}`."""

    role: Role | Literal["..."]
    content: str | None = None
    """The whole text."""
    contains: str | None = None
    """A part of the text, instead."""
    calls: list[ExpectedCall] | None = None
    """Exactly these tool calls."""

    @model_validator(mode="before")
    @classmethod
    def _any_number(cls, value: Any) -> Any:
        return {"role": value} if value == ANYTHING else value

    @model_validator(mode="after")
    def _one_way(self) -> ExpectedMessage:
        if self.content is not None and self.contains is not None:
            raise ValueError("give the whole `content` or a part that it `contains`, not both")
        return self


TurnRewards = float | dict[str, float] | None
"""A turn's rewards: their sum, or each by its name and no other; `null` for any."""


class Expectation(Contract):
    """The expected result. Only the keys that are set are compared."""

    states: list[str] | None = None
    """Every state that the episode enters, including the first."""
    events: list[str] | None = None
    """Every event, in order."""
    outcome: ExpectedOutcome | None = None
    rewards: list[TurnRewards] | None = None
    """The rewards of each assistant turn, compared with a tolerance of 1e-9."""
    limits: list[str] | None = None
    """Every limit that is reached, in order."""
    messages: list[ExpectedMessage] | None = None
    """What was said after the spec's `prompt`."""
    facts: dict[str, Any] | None = None
    """Facts that must exist with these values."""
    counts: dict[str, int] | None = None
    """Counts that must have these values: tool_calls, tool_errors, user_turns, sampled_tokens, context_tokens."""

    @model_validator(mode="after")
    def _something(self) -> Expectation:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("set at least one expected result: `states`, `outcome`, `rewards`, `messages`, …")
        return self


class Scenario(Contract):
    """A scripted episode."""

    name: str = Field(min_length=1)
    """Unique in its file."""
    about: str = ""
    """Description of what it tests."""
    task: str | dict[str, Any] | None = None
    """The id of one of the spec's tasks, or a row as the source would bring it; the first task when left out."""
    sample: int = Field(default=0, ge=0)
    """Which of the task's samples: the episode's seed derives from it."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Values of the spec that are different here, as `--set` takes them: `limits.user_turns: 1`."""
    replies: list[ScriptedReply] = Field(default_factory=list)
    """The replies of the model, turn by turn. A turn without a reply fails with `script_exhausted`."""
    tools: list[ScriptedResult] = Field(default_factory=list)
    """Answers of tools; the first that fits a call serves it. Other calls go to the real tools."""
    user: list[ScriptedUserTurn | None] = Field(default_factory=list)
    """Answers of the user, in order; where `null` stands, and after the last, the real user answers."""
    environment: EnvironmentScript = Field(default_factory=EnvironmentScript)
    scorer: ScriptedScore | None = None
    """What the spec's scorer answers, a function or a judge; the real one when left out."""
    steps: dict[str, list[ScriptedStep | None]] = Field(default_factory=dict)
    """By state: what `step`, or an action of the spec's own, answers there, visit by visit; `null` as for users."""
    out_of_time: OutOfTime | None = None
    """The state at which `limits.episode_seconds` is reached."""
    expect: Expectation


class ScenarioFile(Contract):
    """The scenarios of one spec: `quickstart.scenarios.yaml` beside `quickstart.yaml`."""

    scenarios_of: str | None = None
    """The spec, relative to this file; the one beside this file when left out."""
    set: dict[str, Any] = Field(default_factory=dict)
    """For every scenario; a scenario's own `set` comes after it."""
    scenarios: Annotated[list[Scenario], Field(min_length=1)]

    @model_validator(mode="after")
    def _named_once(self) -> ScenarioFile:
        names = [scenario.name for scenario in self.scenarios]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two scenarios are called `{twice[0]}`")
        return self

    @classmethod
    def adapt_json_schema(cls, schema: dict[str, Any]) -> None:
        """In scenarios, a plain string may replace a reply, a user's answer, a place, and a list of messages."""
        scenario = schema["$defs"]["Scenario"]["properties"]
        replies, user, late = (scenario["replies"], scenario["user"], scenario["out_of_time"])
        replies["items"] = {"anyOf": [replies["items"], {"type": "string"}]}
        for item in (user["items"], late):
            item["anyOf"].append({"type": "string"})
        expected = next(
            one for one in schema["$defs"]["Expectation"]["properties"]["messages"]["anyOf"] if "items" in one
        )
        expected["items"] = {"anyOf": [expected["items"], {"const": "..."}]}


__all__ = [
    "ANYTHING",
    "ContentPart",
    "EnvironmentScript",
    "Expectation",
    "ExpectedCall",
    "ExpectedFailure",
    "ExpectedMessage",
    "ExpectedOutcome",
    "OutOfTime",
    "Scenario",
    "ScenarioFile",
    "ScriptedFault",
    "ScriptedReset",
    "ScriptedResult",
    "ScriptedScore",
    "ScriptedStep",
    "ScriptedUserTurn",
]
