"""New weights on their way to whoever samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.backends.local import LocalBackend
from engine.errors import BackendError, TrainError

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.train.policy import Policy
    from schemas.episode import EpisodeSpec


class WeightSync(Protocol):
    """Brings a policy's weights to a backend."""

    async def push(self, policy: Policy, version: int) -> None:
        """Have every token from now on sampled with these weights, and say `version` of it.

        Raises:
            TrainError: kind `weights_not_taken`: the backend does not sample with them.
        """
        ...


class LocalSync:
    """Copies weights inside this process."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync.push`."""
        try:
            await self._backend.update_weights(await asyncio.to_thread(policy.weights), version)
        except BackendError as error:
            raise TrainError(
                f"the local backend did not take version {version}: {error}", kind="weights_not_taken"
            ) from error


def open_sync(spec: EpisodeSpec, backend: Backend, folder: Path, *, lora: bool) -> WeightSync:
    """How this spec's weights reach this backend.

    Args:
        spec: Its `backend` and `train.weights`.
        backend: Started.
        folder: The training's, for weights that go by way of files.
        lora: Only an adapter is trained.

    Raises:
        TrainError: kind `train_setup`: the backend takes no weights.
    """
    if isinstance(backend, LocalBackend):
        return LocalSync(backend)
    raise TrainError(f"a `{backend.kind}` backend takes no new weights", kind="train_setup")
