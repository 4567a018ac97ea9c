"""What plugins do beside the episodes of a `Runner`: services that start before the first episode and end after the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.plugin import Hook
from engine.schemas.base import Struct
from engine.schemas.sections import used_plugins

if TYPE_CHECKING:
    from pathlib import Path

    from engine.backends.backend import Backend
    from engine.spec.load import LoadedSpec


class Cost(Struct, frozen=True, kw_only=True):
    """What a run, or a training with its evaluations, has cost; earlier launches included."""

    spent: float
    most: float | None = None
    """What it may cost; None: any amount."""


class EpisodeService:
    """Takes part in the episodes of one `Runner`. A subclass defines what it needs."""

    async def start(self, backends: Sequence[Backend]) -> None:
        """The backends of the policy and of roles are started, and episodes begin next. Raises: EngineError: it cannot work."""

    def release(self, episode_id: str) -> None:
        """An attempt of an episode is over."""

    async def close(self) -> None:
        """No more episodes run. Called also where `start` was not, or failed."""

    @property
    def cost(self) -> Cost | None:
        """The costs that it counts; None if it counts none. Read after `close` too."""
        return None


OPEN_SERVICE: Hook[Callable[[LoadedSpec, Path], EpisodeService | None]] = Hook("open_service")
"""Makes the service of a `Runner`; None if the spec needs none. Asked if the spec has a section, a backend or another part of the plugin."""


def open_services(loaded: LoadedSpec, folder: Path) -> list[EpisodeService]:
    """The services that plugins give to the episodes of one `Runner`, not started. `folder`: of the run, or of its training."""
    opened = [make(loaded, folder) for make in OPEN_SERVICE.all(used_plugins(loaded.spec))]
    return [service for service in opened if service is not None]
