"""New weights of a training for the local backend."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from engine.errors import BackendError, TrainError
from engine.train.sync import Pushed, tensor_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from engine.plugins.local.backend import LocalBackend
    from engine.schemas.episode import EpisodeSpec
    from engine.train.policy import Policy


class LocalSync:
    """Copies weights into the model of the local backend between two of its steps, in the precision of that model."""

    def __init__(self, spec: EpisodeSpec, backend: LocalBackend, folder: Path, *, lora: bool) -> None:
        """See `open_sync`."""
        self._backend = backend

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. Running replies continue with the new weights.

        Raises:
            TrainError: kind `weights_not_taken`: the backend did not load the weights.
        """
        weights = await asyncio.to_thread(policy.weights, "model")
        began = time.monotonic()
        try:
            await self._backend.update_weights(weights, version)
        except BackendError as error:
            raise TrainError(
                f"the local backend did not take version {version}: {error}", kind="weights_not_taken"
            ) from error
        taken = self._backend.stats().get("weights_version")
        if taken != version:
            raise TrainError(
                f"the local backend samples with version {taken}, but was sent version {version}",
                kind="weights_not_taken",
            )
        return Pushed(bytes=tensor_bytes(weights.values()), pause_seconds=time.monotonic() - began)
