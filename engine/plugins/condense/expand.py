"""The tool `expand`, which the engine gives the model where `condense.expand` is set."""

from __future__ import annotations

from engine.actions.calling.workers import on_main_loop
from engine.actions.toolbox import BoundTool, bind_tool
from engine.schemas.environment import EpisodeView

NAME = "expand"
_SECONDS = 10.0


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
    return bind_tool(expand, name=NAME, seconds=_SECONDS, effects="pure", where="condense.expand")
