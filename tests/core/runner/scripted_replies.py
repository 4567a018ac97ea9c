"""Replies of scripts that call the tools of `code_for_tests`."""

from __future__ import annotations

from typing import Any

ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}
