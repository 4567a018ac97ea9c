"""States of a conversation that it returns to: after an earlier reply (`resume_at`), and before a prompt (`take_back`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engine.tokens.proof import MessageKinds, View
from engine.tokens.tapes import TapesMark
from engine.tokens.thread import ThreadState, Waiting


class ReplyEnd(msgspec.Struct, frozen=True):
    """How a reply ended."""

    last: int | None
    """Its last sampled id; None if there is none."""
    thinking: bool
    """Whether it ended inside its reasoning."""
    sampled: str | None = None
    """The reply as it was sampled, where that is more than its content."""


class Leaf(NamedTuple):
    """The state of a conversation directly after a reply, from which `resume_at` continues."""

    at: int
    """Number of the reply's tape."""
    end: int
    """Length of that tape after the reply."""
    thread: ThreadState
    prompted: int
    """How many messages of the thread are on the tape."""
    kinds: MessageKinds
    newest: View
    """The reply."""
    last: ReplyEnd
    tools: list[dict[str, Any]] | None


class PromptMark(NamedTuple):
    """The state of a conversation before a prompt was made."""

    tapes: TapesMark
    kinds: MessageKinds
    prompted: int
    waiting: Waiting
