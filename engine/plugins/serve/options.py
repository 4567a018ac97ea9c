"""What the command line says about a service."""

from __future__ import annotations

from engine.schemas.base import Struct

TOKEN = "EPISODE_ENGINE_TOKEN"
"""The variable with the bearer token of the service."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """How a run is served."""

    host: str
    port: int
    token: str
    """The bearer token; empty: one is made."""
    api: bool
    """Whether episodes of programs that run elsewhere are served; otherwise groups."""
    max_requests: int
    """Of groups: requests that are answered at the same time."""
    ahead: int | None
    """Of groups: those of a request that run or wait to be read."""
    again: str
    """The command that continues the run."""
    quiet: bool = False
