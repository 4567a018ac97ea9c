"""Conversations as chat APIs accept them.

Invariant: each tool call that is sent has exactly one result, directly after its message, and each result that is sent as one
belongs to a call. APIs refuse everything else with status 400. So a call without a result of its own (an environment read
it, or nothing executed it) gets one that points to what follows, and the answer to a malformed call, which the assistant message does not have as a call, is sent as a message of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.schemas.message import Message

NO_RESULT = "No result of its own: see the following messages."


def paired(messages: Sequence[Message]) -> list[Message]:
    """The messages, with calls and results in pairs; all texts are kept."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.role == "tool":
            found.append(_as_user(message))
            continue
        found.append(message)
        if not message.tool_calls:
            continue
        results: dict[str | None, Message] = {}
        others: list[Message] = []
        own = {call.id for call in message.tool_calls}
        while at < len(messages) and messages[at].role == "tool":
            result = messages[at]
            at += 1
            if result.tool_call_id in own and result.tool_call_id not in results:
                results[result.tool_call_id] = result
            else:
                others.append(_as_user(result))
        for call in message.tool_calls:
            missing = Message(role="tool", content=NO_RESULT, tool_call_id=call.id, name=call.name)
            found.append(results.get(call.id, missing))
        found += others
    return found


def _as_user(message: Message) -> Message:
    return replace(message, role="user", tool_call_id=None, name=None)
