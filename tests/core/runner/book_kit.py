"""A book that episodes read page by page."""

from __future__ import annotations

from typing import Any

BOOK = """
def read(page: int) -> str:
    return f'page {page}: ' + ' '.join(f'w{page}x{i}' for i in range(40))

def shorten(text: str, budget: int, view, keep: int = 3) -> str:
    return ' '.join(text.split()[:keep])

def numbers(text, budget, view):
    return 7
"""
"""A module with the tool that reads a page, and two condensers."""


def call(page: int) -> dict[str, Any]:
    """The reply that reads a page."""
    return {"tool_calls": [{"name": "read", "arguments": {"page": page}}]}
