"""What the parts of a chat template use of it, so that none of them imports the chat template itself.

Invariant: a renderer writes what the model's template writes, or raises `RenderError`. Nothing here has a state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.tokens.bridge.kinds import Looked, View

if TYPE_CHECKING:
    from engine.tokens.replies.readers import FamilyReader
    from engine.tokens.tape import IntVector
    from engine.tokens.tokenizer import FastTokenizer
    from engine.tokens.toolcalls import ToolCallFormat
    from engine.tokens.views import MessageViews
    from engine.tokens.vision import Vision


class Bridge(msgspec.Struct, frozen=True):
    """What follows a reply: the token that ends it, where the template writes one, and the tokens up to the next reply."""

    closing: list[int]
    bridge: list[int]


class Renderer(Protocol):
    """A chat template as its parts see it; `ChatTemplate` documents the fields."""

    name: str
    fast: FastTokenizer
    tool_role: str
    allow_special: bool
    stop_token_ids: list[int]
    close_id: int | None
    call_format: ToolCallFormat | None
    reader: FamilyReader | None
    vision: Vision | None
    no_vision_fix: str
    knows_tool_results: bool
    knows_reasoning: bool
    calls_shown: int
    reads_calls: bool
    skips_system: bool
    alternates: bool
    views: MessageViews
    looked: Looked
    inspected: re.Pattern[str] | None
    sought: re.Pattern[str] | None

    @property
    def stop_set(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int] | IntVector) -> str:
        """The text of ids, [tokens]."""
        ...

    def borders(self, text: str) -> list[str]: ...

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]: ...

    def text(self, views: Sequence[View], tools: list[View] | None) -> str: ...

    def ids_from(self, views: Sequence[View], tools: list[View] | None, written: str, index: int) -> list[int]: ...

    def unchecked_bridge(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Bridge | None: ...

    def dropped(self, kinds: bytes, tools: list[View] | None) -> str: ...
