"""The Ray cluster of a run: the one that RAY_ADDRESS names, or one on this machine for this run alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import EngineError

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a cluster; `auto`: the one that runs on this machine."""


class ClusterError(EngineError):
    """Ray is not installed, or its cluster cannot be reached."""

    kind = "cluster"
    blame = "spec"


@contextmanager
def cluster(drivers: int) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster. A cluster that was started here ends with the block.

    Args:
        drivers: Number of drivers: a cluster on this machine has room for so many.

    Raises:
        ClusterError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "`rollout.drivers` needs Ray: pip install 'episode-engine[ray]', or run one driver (--drivers 1)"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get(ADDRESS)
    os.environ.setdefault(
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"
    )  # its hook would start drivers in an environment without the engine
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, **common)
        else:
            ray.init(address="local", num_cpus=max(drivers, os.cpu_count() or 1), include_dashboard=False, **common)
    except Exception as error:
        where = f"the cluster at {ADDRESS}={address}" if address else "a cluster on this machine"
        raise ClusterError(f"Ray cannot use {where}: {type(error).__name__}: {error}") from error
    if terminated is not None and threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, terminated
        )  # Ray has set its own, which ends the process before the stores are closed
    try:
        yield ray
    finally:
        ray.shutdown()


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
