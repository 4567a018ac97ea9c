"""The backend of a replay: the journal holds the replies, so no model is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.backends.base import Backend
from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, Generation

if TYPE_CHECKING:
    from engine.schemas.backend import BackendBase
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat


class ReplayBackend(Backend):
    """Refuses to generate: a request means that the journal has ended.

    Args:
        declared: The config class of the run's own backend, whose capabilities hold for the replay too.
    """

    def __init__(self, declared: type[BackendBase]) -> None:
        self.declared = declared

    @classmethod
    def open(cls, spec: Any, format: ChatFormat, loaded: LoadedSpec) -> ReplayBackend:
        """See `Backend.open`."""
        return cls(type(spec))

    async def generate(self, request: GenerateRequest) -> Generation:
        """Refuse.

        Raises:
            BackendError: Always; kind `no_reply`.
        """
        raise BackendError(f"{request.episode_id}: the journal holds no reply for turn {request.turn}", kind="no_reply")
