"""Condensing: how a conversation that has become too long is shown to the model in fewer tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.schemas.backend import BackendSpec
from engine.schemas.base import Contract, Seconds
from engine.schemas.entry import IsolationSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.model import ModelSpec
from engine.schemas.role import RoleMessage, RoleSpec
from engine.schemas.sections import SpecSection

SUMMARY_PROMPT = (
    "Summarise the text between the lines. Keep names, numbers and facts. Use at most {{tokens}} "
    "tokens.\n---\n{{text}}\n---"
)
BY_TEXT = ("chunks", "condenser", "keep_last", "target_tokens", "expand")
"""Keys that say how texts are condensed."""


class ByMessage(Contract):
    """Each text of a message is one chunk."""

    by: Literal["message"] = "message"
    """Each text of a message is one chunk."""


class ByTokens(Contract):
    """Each text is cut into chunks of at most `size` tokens, at the end of a paragraph, a line, a sentence or a
    word."""

    by: Literal["tokens"]
    """Each text is cut into chunks of at most `size` tokens."""
    size: int = Field(default=256, ge=8)
    """Maximum number of tokens of a chunk."""


class ByPassage(Contract):
    """Each text is cut where a pattern matches; the match begins the next chunk."""

    by: Literal["passage"]
    """Each text is cut where a pattern matches."""
    pattern: str = Field(default=r"\n\s*\n", min_length=1)
    """Regular expression (multi-line). Default: an empty line."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value, re.MULTILINE)
        except re.error as error:
            raise ValueError(f"it is not a valid regular expression: {error}") from error
        return value


class ByHistory(Contract):
    """All messages between the prompt and the newest `keep_last` are one chunk: one message of role `user` stands for
    them."""

    by: Literal["history"]
    """All messages between the prompt and the newest ones are one chunk."""


ChunkSpec = Annotated[ByMessage | ByTokens | ByPassage | ByHistory, Field(discriminator="by")]


class DropSpec(Contract):
    """Leave the chunk out; a text stands for it."""

    kind: Literal["drop"] = "drop"
    """Leave the chunk out."""
    text: str = Field(default="[left out]", min_length=1)
    """The text that stands for a chunk."""


class KeywordsSpec(Contract):
    """Keep the chunk's keywords (YAKE, Campos et al., 2020; extra `condense`). No model and no download is needed."""

    kind: Literal["keywords"]
    """Keep the chunk's keywords."""
    language: str = Field(default="en", pattern=r"^[a-z]{2}$")
    """Language of the stop words. Chinese, Japanese and Thai (`zh`, `ja`, `th`) are split into phrases by BudouX."""
    ngram: int = Field(default=3, ge=1, le=5)
    """Maximum number of words of a keyword; in `zh`, `ja` and `th` a keyword is one phrase."""
    tokens: int = Field(default=64, ge=4)
    """Maximum number of tokens of what remains of a chunk."""


class SummarySpec(Contract):
    """A model that is not trained summarises the chunk. A summary that is not shorter than the chunk is not used."""

    kind: Literal["summary"]
    """A model that is not trained summarises the chunk."""
    tokens: int = Field(default=128, ge=4)
    """Maximum number of tokens of a summary."""
    prompt: list[RoleMessage] = Field(default_factory=list)
    """The messages that the model gets: `{{text}}` is the chunk, `{{tokens}}` the budget, `{{task.…}}` a field of the
    task.
    Default: one message that asks for a summary with names, numbers and facts."""
    model: ModelSpec | None = None
    """The model; the policy's own if left out."""
    backend: BackendSpec | None = None
    """Its backend, as for a model-played user."""
    weights: Literal["frozen", "policy"] = "frozen"
    """Its weights during a training of the same model, as for a model-played user."""
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """Its sampling parameters."""
    timeout: Seconds | None = None
    """Deadline of one summary. Default: 10m."""

    @property
    def messages(self) -> list[RoleMessage]:
        """`prompt`, or the default."""
        return self.prompt or [RoleMessage(role="user", content=SUMMARY_PROMPT)]

    @property
    def role(self) -> RoleSpec:
        """The summarising model as a role."""
        return RoleSpec(
            model=self.model,
            backend=self.backend,
            weights=self.weights,
            sampling=self.sampling,
            timeout=self.timeout,
            prompt=self.messages,
            turn_tokens=self.tokens,
        )


class PolicySummarySpec(Contract):
    """The policy summarises its own history: a turn of its own, with its own rewards and credit, which is trained."""

    kind: Literal["policy"]
    """The policy summarises its own history, in a turn that is trained."""
    tokens: int = Field(default=128, ge=4)
    """Tokens that must be free for the summary, so that it is asked for in time."""
    prompt: str = Field(
        default="Your context is nearly full. Summarise the conversation so far: what was asked, what you found, and "
        "what "
        "remains to be done. The messages before this one will be replaced by your summary.",
        min_length=1,
    )
    """The message of role `user` that asks for the summary."""


class OwnCondenserSpec(Contract):
    """A function of your own: `condense(text: str, budget: int, view: EpisodeView) -> str`."""

    kind: Literal["own"]
    """A function of your own."""
    use: str = Field(min_length=1)
    """`package.module:function`, plain or `async`."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Further keyword arguments."""
    tokens: int = Field(default=128, ge=4)
    """Maximum number of tokens of its result; a longer result is not used."""
    timeout: Seconds = 60.0
    """Deadline of one call."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` if left out."""


CondenserSpec = Annotated[
    DropSpec | KeywordsSpec | SummarySpec | PolicySummarySpec | OwnCondenserSpec, Field(discriminator="kind")
]


class WindowSpec(Contract):
    """A window of images: the newest ones stay, and older ones are condensed, several at a time."""

    images: str = Field(pattern=r"^last [1-9]\d*$")
    """`last N`: how many of the newest images stay."""
    step: int | None = Field(default=None, ge=1)
    """K: how many further images are shown before the window slides, all K at once. So a prompt shows at most N + K - 1
    of them, and T images make (T - N) / K + 1 rows of training, rounded down. Default: N."""
    older: Literal["text", "thumbnail", "nothing"] = "text"
    """What stands for an older image: a text, the image in fewer pixels, or nothing. The rest of its message stays."""
    text: str = Field(default="[image left out]", min_length=1)
    """The text that stands for an older image."""
    pixels: int = Field(default=128 * 128, ge=1)
    """Most pixels of a thumbnail, width times height. With `older: thumbnail`, an image that has no more stays as it
    is, and `images` does not count it."""

    @property
    def newest(self) -> int:
        """N."""
        return int(self.images.removeprefix("last "))

    @property
    def further(self) -> int:
        """K."""
        return self.step or self.newest


class CondenseSpec(SpecSection):
    """What the action `condense` does: which parts of the conversation it shortens, and how."""

    NULLABLE: ClassVar[bool] = True

    chunks: ChunkSpec = Field(default_factory=ByMessage)
    """How the conversation is cut into chunks; each condensed chunk becomes one block `<block_N>`."""
    condenser: CondenserSpec = Field(default_factory=DropSpec)
    """What is put in the place of a chunk."""
    roles: list[Literal["tool", "user", "system"]] = Field(default=["tool", "user"])
    """Roles whose messages may be condensed. Not for `chunks: {by: history}`, which condenses all roles."""
    opening: bool = False
    """Whether messages before the model's first reply may be condensed."""
    keep_last: int = Field(default=2, ge=0)
    """How many of the newest messages are never condensed."""
    target_tokens: int | None = Field(default=None, ge=1)
    """Chunks are condensed, oldest first, until the prompt has at most that many tokens. Default: half of the limit on
    the prompt."""
    reserve_tokens: int | None = Field(default=None, ge=0)
    """With `limits.on_overflow: condense`: the prompt must leave that many tokens free, else the conversation is
    condensed first.
    Default: `limits.turn_tokens`, at most a quarter of the limit on the prompt. With `condenser: policy` also
    `limits.tool_result_tokens`, the summary and the message that asks for it, so that the summary always has room."""
    expand: bool = False
    """Whether the model gets the tool `expand`, which returns the original text of a block."""
    keep: WindowSpec | None = None
    """Condense images and no texts: how many images stay, and what stands for older ones. Messages are those of `roles`
    and `opening`."""

    @field_validator("chunks", "condenser", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: Any) -> Any:
        return {"by" if info.field_name == "chunks" else "kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.condenser, PolicySummarySpec) and not isinstance(self.chunks, ByHistory):
            raise ValueError("`condenser: policy` summarises the whole history; write `chunks: history`")
        if isinstance(self.chunks, ByHistory):
            stray = [name for name in ("roles", "opening") if name in self.model_fields_set]
            if stray and (self.roles != ["tool", "user"] or self.opening):
                raise ValueError(f"`{stray[0]}` has no effect with `chunks: history`; leave it out")
        default = CondenseSpec.model_construct()
        if self.keep and (unread := [name for name in BY_TEXT if getattr(self, name) != getattr(default, name)]):
            raise ValueError(f"`{unread[0]}` has no effect with `keep`, which condenses no texts; leave it out")
        return self

    @classmethod
    def adapt_json_schema(cls, definitions: dict[str, Any]) -> None:
        """`condenser: drop` as well as `{kind: drop}`."""
        properties = definitions[cls.__name__]["properties"]
        for key in ("chunks", "condenser"):
            names = {"type": "string", "enum": sorted(properties[key]["discriminator"]["mapping"])}
            rest = {name: value for name, value in properties[key].items() if name not in ("oneOf", "discriminator")}
            properties[key] = {"anyOf": [names, *properties[key]["oneOf"]], **rest}


class CondenseLimits(SpecSection):
    """Before a prompt that is too long."""

    on_overflow: Literal["end", "condense"] = "end"
    """What happens before a prompt that leaves no room for a reply: the event `limit`, or the event `overflow`, which
    leads to the action `condense` and back."""
    condensations: int | None = Field(default=8, ge=1)
    """Maximum number of condensations."""
