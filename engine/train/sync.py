"""New weights reach who samples.

Invariant: when `push` returns, a request that is sent from then on is sampled with these weights and its tokens carry
their version; where that cannot be said, it raises.
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
    """A way for weights."""

    async def push(self, policy: Policy, version: int) -> None:
        """Have the backend sample with the policy as it is now.

        The policy must not change until this returns.

        Args:
            policy: What learns.
            version: What every token that is sampled from now on carries; not negative.

        Raises:
            TrainError: Kind `weights_not_taken`: the backend did not take them, or reports another version; the message
                says which server, and with what the others sample.
        """
        ...


def open_sync(spec: EpisodeSpec, backend: Backend, folder: Path, *, lora: bool) -> WeightSync:
    """The way that `train.weight_sync` names.

    Args:
        spec: Its `train.weight_sync` says how.
        backend: Started.
        folder: The training's; weights for `disk` and `adapter` lie under its `weights`, unless the spec names another.
        lora: Whether the policy is an adapter.

    Raises:
        TrainError: Kind `train_setup`: this backend or this policy does not have this way.
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
    """Into the model in this process: copied over the old weights between two of its steps, in its own precision."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def push(self, policy: Policy, version: int) -> None:
        """See `WeightSync`. Replies that are being made go on with the new weights (a model that sees ends them first).

        Raises:
            TrainError: the backend does not take the weights.
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
                f"the local backend samples with version {taken}, not {version}, which it was given",
                kind="weights_not_taken",
            )
