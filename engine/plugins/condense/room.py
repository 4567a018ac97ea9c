"""When a conversation must be condensed before the model is asked, and the window of images that slides then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from engine.actions.action_facts import Room
from engine.errors import RenderError
from engine.plugins.condense.spec import CondenseSpec, PolicySummarySpec, WindowSpec
from engine.schemas.message import ImagePart, Message, TextPart, image_part
from engine.tokens.image_bank import ImageBank
from engine.tokens.images import open_pixels
from engine.tokens.pixels import to_rgb

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.tokens.conversation import Conversation
    from engine.tokens.template import ChatTemplate

_ASKED, _REPLIED = Message(role="user", content="Q"), Message(role="assistant", content="A")


class CondenseRoom(Room):
    """The room that `condense` and `limits.on_overflow` ask for."""

    def __init__(self, spec: EpisodeSpec, template: ChatTemplate) -> None:
        self._condense = CondenseSpec.or_default(spec)
        self._before_prompts = spec.limits.value_of("on_overflow") == "condense"
        condenser = self._condense.condenser
        self._more = 0
        if isinstance(condenser, PolicySummarySpec):
            follows = spec.limits.tool_result_tokens or 0
            self._more = follows + condenser.tokens + _request_tokens(condenser.prompt, template)

    def reserve(self, free: int) -> int:
        """Tokens that must be free: for a reply; if the policy summarises, also for what follows the reply, and for the
        summary."""
        fixed = self._condense.reserve_tokens
        return free + self._more if fixed is None else fixed

    def images(self, conversation: Conversation, most: float) -> int | None:
        """The number of images, if the window of `condense.keep` slides."""
        keep = self._condense.keep
        if keep is None:
            return None
        older = len(older_images(self._condense, conversation.thread.messages, conversation.opening))
        slides = older >= keep.further or (older and len(conversation.thread.images) > most)
        return older + keep.newest if slides else None

    def leaving(self, messages: Sequence[Message], opening: int) -> int:
        """The images outside of the window, where it slides by itself before a prompt."""
        return len(older_images(self._condense, messages, opening)) if self._before_prompts else 0


def _request_tokens(words: str, template: ChatTemplate) -> int:
    """Tokens that a request of a user adds to a prompt that already has one."""
    request = Message(role="user", content=words)
    try:
        return len(template.render([_ASKED, _REPLIED, request])) - len(template.render([_ASKED]))
    except RenderError:  # a template that refuses such a conversation
        return len(template.encode(words))


def older_images(spec: CondenseSpec | None, thread: Sequence[Message], opening: int) -> list[tuple[int, int]]:
    """The images that go when the window slides, oldest first: (number of the message in the thread, number of the
    part).

    `opening` messages precede the model's first reply.
    """
    if spec is None or spec.keep is None:
        return []
    small = spec.keep.pixels if spec.keep.older == "thumbnail" else 0
    counted = [
        (place, number)
        for place in range(0 if spec.opening else opening, len(thread))
        if thread[place].role in spec.roles and not isinstance(thread[place].content, str)
        for number, part in enumerate(thread[place].content)
        if isinstance(part, ImagePart) and (not part.width or not part.height or part.width * part.height > small)
    ]
    return counted[: -spec.keep.newest]


def slid(
    keep: WindowSpec, thread: Sequence[Message], older: Sequence[tuple[int, int]], bank: ImageBank
) -> list[Message]:
    """The thread without its older images; the other messages are the same objects. Raises: ImageError: the bank lacks
    one."""
    messages = list(thread)
    for place, number in reversed(older):
        content: list[Any] = list(messages[place].content)
        shown = content.pop(number)
        if keep.older == "text":
            content.insert(number, TextPart(text=keep.text))
        elif keep.older == "thumbnail":
            content.insert(number, _thumbnail(bank.source(shown.image).data, keep.pixels))
        messages[place] = replace(messages[place], content=content or "")
    return messages


def _thumbnail(data: bytes, most: int) -> ImagePart:
    """An image in at most that many pixels."""
    image = to_rgb(open_pixels(data))
    scale = sqrt(most / (image.width * image.height))
    height = min(most, max(1, int(image.height * scale)))
    return image_part(image.resize((min(most // height, max(1, int(image.width * scale))), height)))
