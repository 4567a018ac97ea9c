"""The journal record of a condensation, the blocks that it made, and the tool `expand`, which gives their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from engine.actions.calling.code_call import on_main_loop
from engine.actions.toolbox import BoundTool, bind_tool
from engine.schemas.base import Struct
from engine.schemas.environment import EpisodeView
from engine.schemas.journal import RecordBase
from engine.schemas.message import Message

_EXPAND_SECONDS = 10.0


class Block(Struct, frozen=True, kw_only=True):
    """One condensed chunk, which the model sees as `<block_N>`."""

    number: int
    """N, from 1; numbers grow over the whole episode."""
    text: str
    """The text that the model sees inside the block."""
    original: str
    """The text of the chunk, which the tool `expand` returns."""


class CondenseRecord(RecordBase, frozen=True, kw_only=True):
    """The conversation was condensed, or could not be."""

    kind: Literal["condense"] = "condense"
    thread: list[int | Message] | None = None
    """What the model is shown from now on: numbers of messages, and messages that stand for others; None: nothing was
    shorter."""
    blocks: list[Block] = msgspec.field(default_factory=list)
    """The new blocks."""
    before: int = 0
    """Tokens of the prompt before."""
    after: int = 0
    """Tokens of the prompt after."""
    sampled: int = 0
    """Tokens that a summarising model sampled, other than the policy."""

    def answers(self) -> Mapping[str, Any]:
        """No free values; the texts are validated."""
        return {}

    def words(self) -> str:
        """How much shorter the prompt became."""
        if self.thread is None:
            return "nothing shorter"
        count = len(self.blocks)
        what = f"{count} block{'s' * (count != 1)}" if count else "older images"
        return f"{what}, {self.before} → {self.after} tokens"

    def summary(self) -> dict[str, Any]:
        """Tokens before and after, and the number of blocks."""
        return {"before": self.before, "after": self.after, "blocks": len(self.blocks)}

    def said(self) -> Sequence[Message]:
        """The messages that stand for others."""
        return [item for item in self.thread or () if isinstance(item, Message)]

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages in their places."""
        new = iter(messages)
        return replace(self, thread=[item if isinstance(item, int) else next(new) for item in self.thread or ()])


@on_main_loop
async def expand(block: int, view: EpisodeView) -> str:
    """Read the original text of a condensed block of this conversation, `<block_N>`.

    Args:
        block: N, the number of the block.
    """
    text = view.blocks.get(block)
    if text is not None:
        return text
    if not view.blocks:
        return f"There is no block {block}: nothing has been condensed."
    return f"There is no block {block}. The blocks are 1 to {max(view.blocks)}."


def expand_tool() -> BoundTool:
    """The tool. It has no state: the blocks are in the episode's view."""
    return bind_tool(expand, name="expand", seconds=_EXPAND_SECONDS, effects="pure", where="condense.expand")
