"""The servers of `backend.launch`, as backends see them. What starts them is found by the point `launchers`.

A launcher is a function `(spec: ServersSpec, loaded: LoadedSpec) -> ServerProcesses` that starts nothing yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import BackendError
from engine.plugin import entries, load, missing

if TYPE_CHECKING:
    from engine.plugins.launch.servers import ServerProcesses
    from engine.schemas.backend import ServersSpec
    from engine.spec.load import LoadedSpec


def no_launcher(kind: str) -> str | None:
    """What to do because nothing starts servers of a kind; None if something does."""
    if kind in entries("launchers"):
        return None
    return missing("launchers", kind) or "start the servers beside the run, and give their `urls`"


def launched_servers(spec: ServersSpec, loaded: LoadedSpec) -> ServerProcesses | None:
    """The servers of `spec.launch`, not yet started; None if it is not set.

    Raises:
        BackendError: Nothing starts servers of this kind (kind `launch`).
    """
    if spec.launch is None:
        return None
    if (fix := no_launcher(spec.kind)) is not None:
        raise BackendError(f"`backend.launch` cannot start `{spec.kind}` servers: {fix}", kind="launch")
    servers: ServerProcesses = load(entries("launchers")[spec.kind])(spec, loaded)
    return servers
