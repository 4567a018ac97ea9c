"""A tool for verl's `tool_agent`, which loads it from this file."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def calculate(expression: str) -> str:
    """Calculate an expression.

    Args:
        expression: The expression.
    """
    return {"17 + 25": "42", "8 * 7": "56"}[expression]
