"""The model APIs that the endpoint serves."""

from __future__ import annotations

from engine.agents.wire.api import ModelApi
from engine.agents.wire.chat import ChatCompletions
from engine.agents.wire.messages import Messages
from engine.agents.wire.responses import Responses

CHAT, MESSAGES = ChatCompletions(), Messages()
APIS: dict[str, ModelApi] = {api.path: api for api in (CHAT, Responses(), MESSAGES)}
"""By path."""
