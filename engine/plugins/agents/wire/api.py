"""A model API: one class in a file of its own, and one entry in `APIS` (registry.py).

To add one: write the class (its fields, `read`, `whole`, `events`, `fault`), and add it to `APIS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from engine.plugins.agents.wire.requests import ApiError, ModelRequest, Replies, Session
from engine.schemas.base import Struct


class Event(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    data: Mapping[str, Any] | str
    """JSON, or a text as it is."""
    name: str = ""
    """Its `event:` line; empty: it has none."""

    def written(self) -> bytes:
        """The event as server-sent events have it."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + b"data: " + text.encode() + b"\n\n"


class ModelApi(Protocol):
    """One model API."""

    path: str
    """The path of its requests for replies."""
    required_header: str
    """A header that its requests must have; empty: none."""

    def read(self, body: Any, session: Session) -> ModelRequest:
        """Read a request.

        Args:
            body: Its JSON value.
            session: What it is read with.

        Raises:
            ApiError: A field is missing, invalid or not supported.
        """
        ...

    def whole(self, request: ModelRequest, made: Replies, session: Session) -> dict[str, Any]:
        """Write the replies as one JSON object, and store what later requests may refer to."""
        ...

    def events(self, request: ModelRequest, made: Replies, session: Session) -> Iterator[Event]:
        """Write the replies as the events of a stream."""
        ...

    def fault(self, fault: ApiError) -> dict[str, Any]:
        """Write an error as the body of an answer."""
        ...

    def fault_event(self, fault: ApiError) -> Event:
        """Write an error as an event of a stream that has begun."""
        ...
