"""What people write under `prompt` and `recover`, validated: what the spec says to the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from engine.schemas.base import Contract
from engine.schemas.message import ContentPart

DEFAULT_MALFORMED = "Your tool call could not be read: {{problem}} No tool was called. Write the call again in the format that you were given."

Words = str | list[ContentPart]
"""What is said to the model: a text, or text and image parts. `{{field}}` is filled in, in texts and image references."""


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
    """The task's field with the images that `<image>` marks and image parts without an image stand for, in order. If it is
    not set and a row has no such field, `<image>` is text. null: no field."""
    tools: str | None = "tools"
    """The task's field with the schemas of its tools. The model is shown these and no others; the spec's tools of the same
    names answer. A row without it has all tools of the spec. null: no field."""

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
