"""Replies and messages for tests of conversations."""

from __future__ import annotations

from collections.abc import Callable

from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.message import Message
from engine.schemas.trajectory import Branch
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate

Formats = Callable[..., ChatTemplate]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out a sum.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def generation(ids: list[int], finish: str = "stop", version: int = 0) -> Generation:
    """A reply of these ids whose log-probs tell their places."""
    return Generation.read(
        {
            "output_ids": ids,
            "logprobs": [-0.125 * (i + 1) for i in range(len(ids))],
            "finish": FinishReason(type=finish),
            "versions": [VersionSpan(version=version, start=0, end=len(ids))] if ids else [],
        }
    )


def said(form: ChatTemplate, text: str) -> Generation:
    """A reply that is this text, tokenised."""
    return generation(form.encode(text))


def to_the_end(conversation: Conversation) -> list[Branch]:
    """The rows of a conversation, each with all of its tape: what follows the last reply, too."""
    tapes = [tape for tape in conversation.tapes if tape.has_turns] or conversation.tapes[:1]
    return [tape.branch(index) for index, tape in enumerate(tapes)]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str, call: str = "call_0_0") -> Message:
    return Message(role="tool", content=text, name="calculate", tool_call_id=call)
