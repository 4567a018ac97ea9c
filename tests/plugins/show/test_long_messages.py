"""A message that is far too long for a terminal: its beginning is printed, and how much is left out."""

from __future__ import annotations

from io import StringIO

import pytest

from engine.console import SafeConsole
from engine.plugins.show import episode_report
from engine.schemas.message import Message, ToolCall


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_beginning_of_a_long_message_is_printed(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_report, "_SHOWN", 1000)
    text = "<b>\x1b[2J" + "word " * 1_000_000
    call = ToolCall(id="1", name="f", arguments={"a": "x" * 300_000})
    message = Message(role=role, content=text, tool_calls=[call] if role == "assistant" else [])  # type: ignore[arg-type]
    out = StringIO()
    episode_report._print_message(SafeConsole(file=out, width=100), message, None, {})
    printed = out.getvalue()
    assert printed.count("word") < 300
    assert "4,999,007 more characters; --json has them all" in " ".join(printed.split())
    assert "\x1b[2J" not in printed
