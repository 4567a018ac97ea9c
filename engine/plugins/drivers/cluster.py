"""The Ray cluster of a run: the one that RAY_ADDRESS names, or one on this machine for this run alone.

Who reaches a port of a cluster may run code as its user. So a cluster that is started here listens on the loopback
interface only, and refuses clients without a token, which is made for this process and is in no file. Other users of
this machine reach the ports and do not have the token.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from engine.errors import EngineError

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a cluster; `auto`: the one that runs on this machine."""


OLDEST = (2, 52)
"""The first Ray whose clusters can refuse clients without a token."""
TOKEN = "RAY_AUTH_TOKEN"


@contextmanager
def cluster(drivers: int) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster. A cluster that was started here ends with the block.

    Args:
        drivers: Number of drivers: a cluster on this machine has room for so many.

    Raises:
        EngineError: Ray is not installed, or the cluster cannot be reached.
    """
    address = os.environ.get(ADDRESS)
    os.environ.setdefault(
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"
    )  # its hook would start drivers in an environment without the engine
    connected = sys.modules.get("ray")
    if connected is not None and connected.is_initialized():
        yield connected
        return
    terminated = signal.getsignal(signal.SIGTERM)
    with nullcontext() if address else _private_environment():
        ray = _connected(address, drivers)
    if terminated is not None and threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, terminated
        )  # Ray has set its own, which ends the process before the stores are closed
    try:
        yield ray
    finally:
        ray.shutdown()


def _connected(address: str | None, drivers: int) -> Any:
    """The module `ray`, connected to the cluster at an address, or to one that is started.

    Raises:
        EngineError: it is not installed, is too old, or cannot be used.
    """
    try:
        import ray
    except ImportError:
        raise EngineError(
            "`rollout.drivers` needs Ray: pip install 'episode-engine[ray]', or run one driver (--set "
            "rollout.drivers=1)",
            kind="cluster",
            blame="spec",
        ) from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
        raise EngineError(
            f"Ray {ray.__version__} runs the code of every client that reaches its ports; pip install "
            f"'episode-engine[ray]' (Ray {OLDEST[0]}.{OLDEST[1]} or newer), or run one driver (--set "
            "rollout.drivers=1)",
            kind="cluster",
            blame="spec",
        )
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    try:
        if address:
            ray.init(address=address, **common)
        else:
            constants = ray._private.ray_constants  # Ray read the variables when it was imported, maybe before this run
            constants.ENABLE_RAY_CLUSTER = False
            ray._raylet.Config.initialize("")
            ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
            try:
                cpus = max(drivers, os.cpu_count() or 1)
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **common)
            finally:
                constants.ENABLE_RAY_CLUSTER = not constants.IS_WINDOWS_OR_OSX
            _check_private(ray)
    except EngineError:
        ray.shutdown()
        raise
    except Exception as error:
        where = f"the cluster at {ADDRESS}={address}" if address else "a cluster on this machine"
        words = f"Ray cannot use {where}: {type(error).__name__}: {error}"
        raise EngineError(words, kind="cluster", blame="spec") from error
    return ray


@cache
def _token() -> str:
    """The token of this process's clusters: Ray reads it once for each process."""
    return secrets.token_hex(32)


@contextmanager
def _private_environment() -> Iterator[None]:
    """Inside the block Ray starts clusters that listen on the loopback interface and ask for the token.

    The variables are gone afterwards, so that other programs of this process do not get the token.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        TOKEN: _token(),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one host, with the address 127.0.0.1, on every system
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_private(ray: Any) -> None:
    """Refuse a cluster of this process that others could use.

    Raises:
        EngineError: it listens on other interfaces, or asks for no token.
    """
    address = ray.get_runtime_context().gcs_address
    mode = ray._raylet.get_authentication_mode()
    if address.startswith("127.0.0.1:") and mode == ray._raylet.AuthenticationMode.TOKEN:
        return
    raise EngineError(
        f"Ray {ray.__version__} started a cluster at {address} with authentication {mode}: others could run code on "
        f"it. Start the command in a process that has not imported ray, or name a cluster with {ADDRESS}",
        kind="cluster",
        blame="spec",
    )


def nodes_of(ray: Any, drivers: int) -> list[str]:
    """The node on which each driver is placed: each goes to the node that has the most free CPUs then.

    A driver that dies begins again on its node, where its journals are, as long as that node is alive.
    """
    free = {node["NodeID"]: float(node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["Alive"]}
    chosen = []
    for _ in range(drivers):
        node = max(free, key=lambda each: free[each])
        free[node] -= 1.0
        chosen.append(node)
    return chosen
