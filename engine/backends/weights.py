"""Which weights a trainer has given to the servers of a backend.

Invariant: the trainer alone gives servers weights; after `follow(weights)` no request is answered with older ones.
"""

from __future__ import annotations

from engine.schemas.base import Struct


class ServerWeights(Struct, frozen=True, kw_only=True):
    """The weights that a trainer has given to servers."""

    version: int
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use; None: all of them."""


class GivenWeights:
    """Which weights the servers were given. These are given none: a subclass says what they are given."""

    expected: str | None = None
    """Name of the weights that every request sent from now on must be sampled with; None: any."""
    prefixes: str | None = None
    """Name of the weights that computed the cached prefixes that requests may use from now on; None: all of them."""

    def accepts(self, version: str, expected: str) -> bool:
        """Whether a reply may be sampled with the weights `version`, if `expected` was expected when it was
        requested."""
        return version == expected


class PolicyAdapter(Struct, frozen=True, kw_only=True):
    """The LoRA adapter under training: requests that name no adapter are sampled with it."""

    name: str
    version: int
