"""When a prompt leaves too little room, so that an action of a plugin must make it shorter before the model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.plugin import load
from engine.schemas.sections import written_entries

if TYPE_CHECKING:
    from engine.actions.action_facts import ActionFacts
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.message import Message
    from engine.tokens.conversation import Conversation
    from engine.tokens.template import ChatTemplate


class Room:
    """What an action that makes room needs. Made once per spec; the defaults need nothing."""

    def reserve(self, free: int) -> int:
        """Tokens that a prompt must leave, given those that a reply needs."""
        return free

    def images(self, conversation: Conversation, most: float) -> int | None:
        """The number of images that a conversation shows, where they are too many, of which `most` may be shown; None: they are not."""
        return None

    def leaving(self, messages: Sequence[Message], opening: int) -> int:
        """How many images of a thread go before the next prompt. `opening` messages precede the model's first reply."""
        return 0


def rooms_of(spec: EpisodeSpec, template: ChatTemplate) -> list[Room]:
    """The rooms of the plugins whose sections a spec has."""
    actions: list[ActionFacts] = written_entries(spec, "actions")
    return [load(facts.makes_room)(spec, template) for facts in actions if facts.makes_room]
