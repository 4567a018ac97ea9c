"""Messages, arguments and results of an episode in the JSON form of the GenAI semantic conventions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.schemas.message import Message, TextPart, ToolResult

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory


def message_json(message: Message) -> dict[str, Any]:
    """Return a message with its parts: text, reasoning, images by reference, calls and results of tools."""
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.text})
    elif isinstance(message.content, str):
        parts += [{"type": "text", "content": message.content}] if message.content else []
    else:
        parts += [
            {"type": "text", "content": part.text}
            if isinstance(part, TextPart)
            else {"type": "uri", "modality": "image", "mime_type": part.mime, "uri": part.image}
            for part in message.content
        ]
    parts += [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return {"role": message.role, "parts": parts}


def result_json(result: ToolResult) -> str:
    """Return what a tool answered, as JSON."""
    content = result.content
    return _json(content if isinstance(content, str) else [part.model_dump(mode="json") for part in content])


class Replies:
    """The replies of an episode, and the messages that the model got before each.

    Args:
        trajectory: The episode.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        messages = trajectory.messages
        said = [index for index, message in enumerate(messages) if message.role == "assistant"]
        own = said[len(said) - len(trajectory.turns) :] if len(said) >= len(trajectory.turns) else []
        self._messages = messages
        self._own = {turn.index: at for turn, at in zip(trajectory.turns, own, strict=False)}
        self._before = {at: before + 1 for before, at in zip([-1, *own], own, strict=False)}
        self._arguments = {call.id: call.arguments for message in messages for call in message.tool_calls}

    def attributes(self, turn: int, finish: str) -> dict[str, Any]:
        """Return the messages since the turn before, and the reply; nothing if the turn has no message."""
        at = self._own.get(turn)
        if at is None:
            return {}
        told = [message_json(message) for message in self._messages[self._before[at] : at]]
        reply = message_json(self._messages[at]) | {"finish_reason": finish}
        return {"gen_ai.input.messages": _json(told), "gen_ai.output.messages": _json([reply])}

    def arguments(self, call_id: str) -> str | None:
        """Return the arguments of a call, as JSON; None if it was malformed."""
        found = self._arguments.get(call_id)
        return None if found is None else _json(found)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
