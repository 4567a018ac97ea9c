"""What people write under `model`, `prompt` and `recover`: which model speaks, and what the spec says to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from engine.schemas.base import Contract
from engine.schemas.message import ContentPart


class ModelSpec(Contract):
    """Which model speaks, and how conversations become its tokens."""

    path: str = Field(min_length=1)
    """A folder, a hub id, or a name in the catalogue (`engine models` lists it)."""
    revision: str | None = None
    """Hub revision, if `path` is a hub id."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. Default: that of the model."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template. Relative to the spec."""
    renderer: str = "auto"
    """`auto` or `template`: the model's own chat template renders; or the name of a family in the library `renderers`,
    which then renders in its place."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, for example `enable_thinking: false`."""
    template_patches: bool | list[str] = False
    """Patches of the chat template's known defects: `true` for all that are known for it, or their names.
    `engine template MODEL` lists them. A server or a program that renders text itself must have the patched template
    too (`engine template MODEL --patches --write FILE`)."""
    history: Literal["branch", "keep"] = "branch"
    """If the template rewrites history (for example drops old reasoning): begin a new exact branch, or keep the sampled
    tokens."""
    tool_calls: str = "auto"
    """How calls are written: `auto` (as the chat template writes them; the engine tests which reader reads them back),
    `hermes`, `plain` (`name(arg=1)` in call tags), `pythonic` (LFM2's), or `package.module:Class` for a
    `ToolCallFormat` of your own."""
    tool_role: Literal["tool", "user"] = "tool"
    """The role of tool results, for templates without a tool role."""
    hidden_roles: list[Literal["system", "user", "tool"]] = Field(default_factory=list)
    """Roles whose messages the chat template leaves out on purpose, old tool results for example: a new exact branch
    begins there. Messages of other roles are never lost: the episode fails. With `system`, a template that refuses a
    system message after the first message is not shown it."""
    allow_special: bool = False
    """Whether text of users, tools, environments, task fields and replies that spells a special or other added token
    (`<|im_end|>`, `<think>`) becomes that token. Left out, it is encoded as plain text; the spec's own prompts and the
    chat template
    always may."""
    context: int | None = Field(default=None, gt=0)
    """Maximum context length in tokens. Default: read from the model's config."""
    max_images: int | None = Field(default=None, ge=1)
    """Maximum number of images in one conversation; one more fails the episode."""
    max_image_pixels: int = Field(default=33_554_432, ge=1)
    """Most pixels of one image as it comes; a larger one fails the episode. The model's processor scales those below
    it."""


DEFAULT_MALFORMED = (
    "Your tool call could not be read: {{problem}} No tool was called. Write the call again in the "
    "format that you were given."
)

Words = str | list[ContentPart]
"""What is said to the model: a text, or text and image parts. `{{field}}` is filled in, also in image references."""


class PromptMessage(Contract):
    """A message of the prompt. `{{field}}` is a field of the task."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Words
    """Text, or a list of text and image parts; an image's path is relative to the spec."""


class PromptField(Contract):
    """Each task has its own conversation: OpenAI messages in a field of the row."""

    field: str = Field(min_length=1)
    """The task's field with the messages; a text is one message of the user. Dotted names are allowed."""
    images: str | None = "images"
    """The task's field with the images that `<image>` marks and image parts without an image stand for, in order. If it
    is not set and a row has no such field, `<image>` is text. null: no field."""
    tools: str | None = "tools"
    """The task's field with the schemas of its tools. The model is shown these and no others; the spec's tools of the
    same names answer. A row without it has all tools of the spec. null: no field."""

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was not set: a row must have a field that the spec names, also when a stored spec is read."""
        written: dict[str, Any] = whole(self)
        return {name: value for name, value in written.items() if name in self.model_fields_set}


class RecoverSpec(Contract):
    """Messages to the model if its reply cannot be used: text, or a list of text and image parts.

    `{{task.question}}` is a field of the task, in all of them. An image's path is relative to the spec.
    """

    malformed: Words = DEFAULT_MALFORMED
    """For a tool call that could not be parsed. `{{problem}}` is the error, `{{raw}}` the text of the call."""
    wrong: Words | None = None
    """For an answer that the user finds wrong, with the fields that the user gives. Default: the user's own message."""
    no_answer: Words | None = None
    """For a reply in which the user finds no answer, with the same fields and default."""
