"""The tool `check_sums`, with which the model checks sums before it answers."""

from __future__ import annotations

from engine.actions.toolbox import BoundTool, bind_tool
from sum_check.facts import SECONDS
from sum_check.sums import checked_sums


def check_sums(text: str) -> str:
    """Check sums such as 17 + 25 = 42.

    Args:
        text: One or more sums, each in a line of its own.
    """
    sums = checked_sums(text)
    if not sums:
        raise ValueError("there is no sum in the text; write one such as 17 + 25 = 42")
    return "\n".join(f"{each.text}: {'right' if each.right else f'wrong, it is {each.value}'}" for each in sums)


def sums_tool() -> BoundTool:
    """The tool, for all episodes."""
    return bind_tool(check_sums, name=None, seconds=SECONDS, effects="pure", where="sum_check.tool")
