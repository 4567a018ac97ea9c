"""The servers of `backend.launch`, as backends see them. What starts them is found by the point `launchers`.

A launcher is a function `(spec: ServersSpec, loaded: LoadedSpec) -> LaunchedServers` that starts nothing yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import BackendError
from engine.plugin import entries, load, missing

if TYPE_CHECKING:
    from engine.schemas.backend import ServersSpec
    from engine.spec.load import LoadedSpec


class LaunchedServers(Protocol):
    """All servers of one backend."""

    @property
    def urls(self) -> list[str]:
        """The URL of each server."""
        ...

    async def start(self, folder: Path | None) -> None:
        """Start all servers, and return when they answer.

        Args:
            folder: Folder of the logs; made if it does not exist. None: a folder of the cache.

        Raises:
            BackendError: One of them does not start (kind `launch`).
        """
        ...

    async def close(self) -> None:
        """End all servers."""
        ...

    def stats(self) -> list[dict[str, Any]]:
        """Statistics of each server, for the summary at the end of a run."""
        ...


def no_launcher(kind: str) -> str | None:
    """What to do because nothing starts servers of a kind; None if something does."""
    if kind in entries("launchers"):
        return None
    return missing("launchers", kind) or "start the servers beside the run, and give their `urls`"


def launched_servers(spec: ServersSpec, loaded: LoadedSpec) -> LaunchedServers | None:
    """The servers of `spec.launch`, not yet started; None if it is not set.

    Raises:
        BackendError: Nothing starts servers of this kind (kind `launch`).
    """
    if spec.launch is None:
        return None
    if (fix := no_launcher(spec.kind)) is not None:
        raise BackendError(f"`backend.launch` cannot start `{spec.kind}` servers: {fix}", kind="launch")
    servers: LaunchedServers = load(entries("launchers")[spec.kind])(spec, loaded)
    return servers
