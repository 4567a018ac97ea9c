"""The model APIs that the endpoint serves, and the list of its one model, as OpenAI and Anthropic write it."""

from __future__ import annotations

from typing import Any

from engine.plugins.agents.wire.chat import ChatCompletions
from engine.plugins.agents.wire.messages import Messages
from engine.plugins.agents.wire.requests import ApiError, ModelApi, Session
from engine.plugins.agents.wire.responses import Responses

CHAT, MESSAGES = ChatCompletions(), Messages()
APIS: dict[str, ModelApi] = {api.path: api for api in (CHAT, Responses(), MESSAGES)}
"""By path."""
MODELS_PATH = "/v1/models"


def one_model(name: str, session: Session, *, anthropic: bool) -> dict[str, Any]:
    """The model.

    Args:
        name: Its name.
        session: Whose model it is.
        anthropic: Write it as Anthropic's API does.

    Raises:
        ApiError: the session's model has another name.
    """
    if name != session.model:
        text = f"the model {name!r} does not exist; the only model is {session.model!r}"
        raise ApiError(text, param="model", status=404, code="model_not_found")
    if anthropic:
        created = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "episode"}


def list_models(session: Session, *, anthropic: bool) -> dict[str, Any]:
    """The list of the one model; arguments as of `one_model`."""
    model = one_model(session.model, session, anthropic=anthropic)
    if anthropic:
        return {"data": [model], "first_id": session.model, "last_id": session.model, "has_more": False}
    return {"object": "list", "data": [model]}
