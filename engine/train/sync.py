"""Sends new weights to the backend.

Invariant: after `push` returns, every new request is sampled with these weights and its tokens carry their version. If that is
not certain, `push` raises.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.errors import BackendError, TrainError

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.backends.local import LocalBackend
    from engine.schemas.episode import EpisodeSpec
    from engine.train.policy import Policy


class WeightSync(Protocol):
    """A way to send weights."""

    async def push(self, policy: Policy, version: int) -> None:
        """Let the backend sample with the present weights of the policy, which must not change until this returns.

        Args:
            policy: The policy that is trained.
            version: The version that every token sampled from now on carries; not negative.

        Raises:
            TrainError: kind `weights_not_taken`: the backend did not load the weights, or reports another version. The message
                names the server and the versions of the others.
        """
        ...


def open_sync(spec: EpisodeSpec, backend: Backend, folder: Path, *, lora: bool) -> WeightSync:
    """Make the `WeightSync` of `train.weight_sync`.

    Args:
        spec: The spec.
        backend: The backend, started.
        folder: The training's folder; weights for `disk` and `adapter` are in its folder `weights`, unless the spec names another.
        lora: Whether the policy is a LoRA adapter.

    Raises:
        TrainError: kind `train_setup`: this backend or this policy does not support the method.
    """
    if spec.train is None:
        raise TrainError("the spec has no `train:` section", kind="train_setup")
    weights = spec.train.weight_sync
    if backend.kind == "local":
        from engine.backends.local import LocalBackend

        assert isinstance(backend, LocalBackend)
        if weights.method not in ("auto", "tensors"):
            raise TrainError(
                f"`train.weight_sync.method: {weights.method}` is for servers; the local backend takes tensors: leave it out",
                kind="train_setup",
            )
        return LocalSync(backend)
    if backend.kind == "sglang":
        from engine.train.sync_sglang import open_sglang_sync

        return open_sglang_sync(spec, backend, folder, lora=lora)
    raise TrainError(
        f"a `{backend.kind}` backend cannot take new weights; train with `local` or `sglang`", kind="train_setup"
    )


class LocalSync:
    """Copies weights into the model of the local backend between two of its steps, in the precision of that model."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync`. Running replies continue with the new weights; a model with images finishes them first.

        Raises:
            TrainError: kind `weights_not_taken`: the backend did not load the weights.
        """
        weights = await asyncio.to_thread(policy.weights, "model")
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
