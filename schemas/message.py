"""A conversation's messages, with parts, tool calls and tool results, as everything else reads and stores them."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from os import PathLike, fspath
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from engine.schemas.base import Contract, Struct
from engine.schemas.reward import RewardEvent

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(Contract):
    """A run of text inside a message's content."""

    type: Literal["text"] = "text"
    text: str


class ImagePart(Contract):
    """An image in a message's content, by reference; the image itself is in the run store."""

    type: Literal["image"] = "image"
    image: str
    """`sha256:<hex>` once it is in the run store; before that a path, `file://` or `data:` URI."""
    mime: str | None = None
    """Media type such as `image/png`, if it is known."""
    width: int | None = Field(default=None, gt=0)
    """Width in pixels, if it is known."""
    height: int | None = Field(default=None, gt=0)
    """Height in pixels, if it is known."""


_UNSUPPORTED = {
    "video": "show frames of it, as parts `{type: image, image: …}`",
    "audio": "write what is heard as text",
    "image_url": "write the image as `{type: image, image: …}`, by path, `file://` or `data:` URI",
}
"""Other parts that chat messages may have, by what they hold, and what to write instead."""


def _supported(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str):
        for name, instead in _UNSUPPORTED.items():
            if name in kind:
                raise ValueError(f"parts of `type: {kind}` are not supported, only `text` and `image`: {instead}")
    return part


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type"), BeforeValidator(_supported)]

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"RIFF", "image/webp"),
)


def image_part(image: Any) -> ImagePart:
    """Make a message part from an image.

        image_part(Image.new("RGB", (64, 64)))   # a PIL image: encoded as PNG, so nothing is lost
        image_part(data)                          # the bytes of a PNG, JPEG, WebP, … file, as they are
        image_part(Path("square.png"))            # a path, which is read when the message is said
        image_part("sha256:…")                    # a reference: also a path, a `file://` or a `data:` URI

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(image, ImagePart):
        return image
    if isinstance(image, str):
        return ImagePart(image=image)
    if isinstance(image, PathLike):
        return ImagePart(image=fspath(image))
    if isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
        mime = next((mime for magic, mime in _MAGIC if data.startswith(magic)), "application/octet-stream")
        return ImagePart(image=f"data:{mime};base64,{b64encode(data).decode()}")
    if callable(getattr(image, "save", None)):
        buffer = BytesIO()
        image.save(buffer, format="PNG")
        return image_part(buffer.getvalue())
    raise TypeError(
        f"a {type(image).__name__} is not an image; give a PIL image, a file's bytes, a path or a data: URI"
    )


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call of the model."""

    id: str
    """Unique inside the episode: `call_<turn>_<index>`."""
    name: str
    """The tool's name, as the model wrote it."""
    arguments: dict[str, Any]
    """Arguments by name, parsed but not yet validated against the tool's schema."""


class MalformedCall(Struct, frozen=True, kw_only=True):
    """A tool call that could not be parsed."""

    raw: str
    """The text of the call, as the model wrote it."""
    problem: str
    """What is wrong, in a form that helps the model to correct it."""


class ToolResult(Struct, frozen=True, kw_only=True):
    """The result of one tool call. A failed call has a result too."""

    call_id: str
    name: str
    content: str | list[ContentPart]
    """The content that the model sees."""
    error: Literal["timeout", "invalid_arguments", "unknown_tool", "raised", "limit", "malformed"] | None = None
    """Why the call failed; None if it did not."""
    rewards: list[RewardEvent] = msgspec.field(default_factory=list)
    """Reward events that the tool wrote, addressed to assistant turns."""
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    """Values that guards read as `facts.<name>`; later values replace earlier ones."""
    seconds: float = 0.0
    """Wall time of the call."""


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] = ""
    reasoning: str | None = None
    """The model's reasoning, if its template separates it from the content."""
    signed: list[dict[str, Any]] | None = None
    """As `Generation.signed`."""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    """The tool calls of this assistant message, in order."""
    tool_call_id: str | None = None
    """For role `tool`: the call that this answers."""
    name: str | None = None
    """For role `tool`: the tool's name."""

    @property
    def text(self) -> str:
        """The content's text parts, joined; images contribute nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> list[ImagePart]:
        """The content's images, in order."""
        if isinstance(self.content, str):
            return []
        return [part for part in self.content if isinstance(part, ImagePart)]
