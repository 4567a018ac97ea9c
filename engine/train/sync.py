"""Sends new weights to the backend.

Invariant: after `push` returns, every new request is sampled with these weights and its tokens carry their version. If
that is not certain, `push` raises.

Where servers and trainer are on the same GPUs in turn, a plugin lends the servers' memory to a running update; the next
push gives it back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine import plugin
from engine.errors import TrainError
from engine.plugin import Hook
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from engine.backends.backend import Backend
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.train.policy import Policy


class Pushed(Struct, frozen=True, kw_only=True):
    """What a push cost."""

    bytes: int
    """Bytes of the weights, in the number type in which they were sent; once, however many servers there are."""
    pause_seconds: float
    """Seconds in which no server sampled."""


class WeightSync(Protocol):
    """A way to send weights."""

    async def push(self, policy: Policy, version: int) -> Pushed:
        """Let the backend sample with the present weights of the policy, which must not change until this returns.

        Args:
            policy: The policy that is trained.
            version: The version that every token sampled from now on carries; not negative.

        Raises:
            TrainError: kind `weights_not_taken`: the backend did not load the weights, or reports another version. The
                message names the server and the versions of the others.
        """
        ...


def open_sync(spec: EpisodeSpec, backend: Backend, folder: Path, *, lora: bool) -> WeightSync:
    """Make the `WeightSync` of `train.weight_sync`.

    Args:
        spec: The spec.
        backend: The backend, started.
        folder: The training's folder; weights for `disk` and `adapter` are in its folder `weights`, unless the spec
            names another.
        lora: Whether the policy is a LoRA adapter.

    Raises:
        TrainError: kind `train_setup`: this backend or this policy does not support the method.
    """
    assert spec.train is not None  # `train_spec_of` has checked it, and that weights can be sent to this backend
    weights = spec.train.weight_sync
    if weights.method not in spec.backend.weight_methods:
        taken = " or ".join(f"`{method}`" for method in spec.backend.weight_methods)
        raise TrainError(
            f"`train.weight_sync.method: {weights.method}`: the `{spec.backend.kind}` backend takes only {taken}",
            kind="train_setup",
        )
    opened: WeightSync = plugin.load(plugin.entries("weight_syncs")[spec.backend.kind])(
        spec, backend, folder, lora=lora
    )
    return opened


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors of any shapes; tensors that share memory count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


class LentMemory:
    """The memory of the servers' GPUs, which the servers keep: the trainer has GPUs of its own."""

    @asynccontextmanager
    async def lent(self, timed: Callable[[str], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Inside the block the GPUs are free for an update. The next push of weights gives the memory back."""
        yield

    async def take_back(self) -> None:
        """Give the servers what no push of weights has given back."""


LEND_MEMORY: Hook[Callable[[LoadedSpec, Backend], LentMemory | None]] = Hook("lend_memory")
"""Lets the servers of a training's backend, which is not started yet, lend their memory; None if the spec does not ask
for it."""
