"""The model APIs that the endpoint serves."""

from __future__ import annotations

from engine.plugins.agents.wire.api import ModelApi
from engine.plugins.agents.wire.chat import ChatCompletions
from engine.plugins.agents.wire.messages import Messages
from engine.plugins.agents.wire.responses import Responses

CHAT, MESSAGES = ChatCompletions(), Messages()
APIS: dict[str, ModelApi] = {api.path: api for api in (CHAT, Responses(), MESSAGES)}
"""By path."""
