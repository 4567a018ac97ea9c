"""A backend that asks no model: what a replay has in the place of one."""

from __future__ import annotations

from typing import Any

from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, Generation


class ReplayBackend:
    """Refuses to generate. `trainable` is what the run's own backend was.

    A replay feeds the journal's replies; being asked for one means that the journal has come to its end.
    """

    kind = "replay"

    def __init__(self, *, trainable: bool) -> None:
        self.trainable = trainable

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises BackendError: the journal holds no further reply."""
        raise BackendError(f"{request.episode_id}: the journal holds no reply for turn {request.turn}", kind="no_reply")

    async def close(self) -> None:
        """Nothing to close."""

    def stats(self) -> dict[str, Any]:
        """Nothing to count."""
        return {}
