"""What is known of an action without its class. The table of all actions is in `engine.actions.facts`; plugins add to
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from engine.plugin import load
from engine.schemas.base import Struct
from engine.schemas.sections import written_actions

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.machine import StateSpec
    from engine.schemas.message import Message
    from engine.tokens.conversation import Conversation
    from engine.tokens.template import ChatTemplate


Seconds = Callable[["EpisodeSpec", "StateSpec"], float]
"""Maximum seconds of one visit of a state; infinite if there is no limit."""

OWN_ACTION_SECONDS = 60.0
"""Deadline of a custom action whose state sets none."""

NO_CALLS, MAYBE_CALLS, SURE_CALLS = 0, 1, 2
"""What an event says about the tool calls of the newest reply: none, possibly some, at least one."""


class ActionFacts(Struct, frozen=True, kw_only=True):
    """One built-in action."""

    use: str
    """`module:class` of its implementation."""
    does: str
    """Its description in one sentence, for the docs."""
    events: tuple[str, ...] | None
    """Its possible events besides `ALWAYS`; None: the spec's environment declares them."""
    seconds: Seconds
    speaks: Literal["assistant", "user", "tool"] | None = None
    """Role of the message that it adds to the conversation; None if it adds no message or several roles."""
    silent_events: tuple[str, ...] = ()
    """Of its events: those with which it adds no message."""
    writes: tuple[str, ...] = ()
    """Of an action of a plugin: names of the rewards and facts that it writes."""
    calls: Mapping[str, int] | None = None
    """For an action that samples a reply: what its events say about tool calls; `MAYBE_CALLS` for events not listed."""
    overflows: bool = False
    """Whether it may end with `OVERFLOW` in a state that has a transition for it."""
    answers_calls: bool = False
    """Whether it runs the tool calls of the newest reply, and so takes no time without calls."""
    owns_conversation: bool = False
    """Whether it begins the conversation and brings its messages, so that `reset` opens none."""
    rewrites_history: bool = False
    """Whether it may show the model another conversation from the next prompt on, so that a branch begins."""
    rewrites_machine: str = ""
    """Of an action of a plugin: `module:function` from (spec, machine) to the machine with the states that the plugin's
    section asks for."""
    makes_room: str = ""
    """Of an action of a plugin that makes a prompt shorter: `module:class` of its `Room`, made of (spec, chat format).
    It is asked, as `rewrites_machine`, only where the plugin's section is written."""


class Room:
    """What an action that makes room needs. Made once per spec; the defaults need nothing."""

    def reserve(self, free: int) -> int:
        """Tokens that a prompt must leave, given those that a reply needs."""
        return free

    def images(self, conversation: Conversation, most: float) -> int | None:
        """The number of images that a conversation shows, where they are too many, of which `most` may be shown; None:
        they are not."""
        return None

    def leaving(self, messages: Sequence[Message], opening: int) -> int:
        """How many images of a thread go before the next prompt. `opening` messages precede the model's first reply."""
        return 0


def rooms_of(spec: EpisodeSpec, template: ChatTemplate) -> list[Room]:
    """The rooms of the plugins whose sections a spec has."""
    actions: list[ActionFacts] = written_actions(spec)
    return [load(facts.makes_room)(spec, template) for facts in actions if facts.makes_room]
