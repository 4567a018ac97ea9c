"""What a trainer does to the servers of a backend: it says which weights they have, and sends them.

Invariant: the trainer alone gives servers weights; after `follow(weights)` no request is answered with older ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.backends.backend import Backend


class ServerWeights(Struct, frozen=True, kw_only=True):
    """The weights that a trainer has given to servers."""

    version: int
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use; None: all of them."""


@runtime_checkable
class WeightTarget(Protocol):
    """A backend whose servers get weights from a trainer."""

    def server_weights(self, version: int) -> ServerWeights:
        """What other processes that use the same servers `follow`, after this one has pushed `version`."""
        ...

    def follow(self, weights: ServerWeights) -> None:
        """Let a trainer in another process give the servers their weights: requests sent from now on are not answered with older ones."""
        ...


class GivenWeights(Protocol):
    """Which weights the servers were given; None: their own."""

    @property
    def expected(self) -> str | None:
        """Name of the weights that every request sent from now on must be sampled with."""

    @property
    def prefixes(self) -> str | None:
        """Name of the weights that computed the cached prefixes that requests may use from now on."""

    def accepts(self, version: str, expected: str) -> bool:
        """Whether a reply may be sampled with the weights `version`, if `expected` was expected when it was requested."""


class OwnWeights:
    """The `GivenWeights` of servers that are given none."""

    expected: str | None = None
    prefixes: str | None = None

    def accepts(self, version: str, expected: str) -> bool:
        """Nothing is expected."""
        return True


class PolicyAdapter(Struct, frozen=True, kw_only=True):
    """The LoRA adapter under training: requests that name no adapter are sampled with it."""

    name: str
    version: int


class NoServers:
    """The `WeightTarget` of a backend without such servers."""

    def server_weights(self, version: int) -> ServerWeights:
        """Say the version alone."""
        return ServerWeights(version=version)

    def follow(self, weights: ServerWeights) -> None:
        """Nothing samples with these weights."""


def weight_target(backend: Backend) -> WeightTarget:
    """The backend, if a trainer gives its servers weights; else a target that does nothing."""
    return backend if isinstance(backend, WeightTarget) else NoServers()
