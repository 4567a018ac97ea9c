"""Which weights a trainer has given to the servers of a backend.

Invariant: the trainer alone gives servers weights; after `follow(weights)` no request is answered with older ones.
"""

from __future__ import annotations

from typing import Protocol

from engine.schemas.base import Struct


class ServerWeights(Struct, frozen=True, kw_only=True):
    """The weights that a trainer has given to servers."""

    version: int
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use; None: all of them."""


class GivenWeights(Protocol):
    """Which weights the servers were given; None: their own."""

    @property
    def expected(self) -> str | None:
        """Name of the weights that every request sent from now on must be sampled with."""

    @property
    def prefixes(self) -> str | None:
        """Name of the weights that computed the cached prefixes that requests may use from now on."""

    def accepts(self, version: str, expected: str) -> bool:
        """Whether a reply may be sampled with the weights `version`, if `expected` was expected when it was
        requested."""


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
