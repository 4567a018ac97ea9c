"""The Ray actors of a run: one coordinator, and the drivers.

Rows and journals never go through the coordinator: it knows only ids of groups and counts. Both may be killed at any
time. Ray starts them again; the coordinator reads its leases from its file, and a driver asks for its leases and reads
its journals.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import EngineError, StoreError
from engine.plugins.drivers.leases import FILE, Lease, LeaseAnswer, Leases
from engine.plugins.drivers.session import Done, Report, Setup, machine_id, prepare_process, run_driver

PAUSE = 0.1
"""Seconds before a call is repeated, because the coordinator is being started again."""


class Coordinator:
    """Leases groups to drivers, and collects their reports. An actor with one event loop, so that its methods never run
    at one time.

    Args:
        folder: The run's folder.
        groups: Number of groups.
        lease_seconds: Time without a call after which a driver loses its leases.
        shared: Whether finished groups are published where every host reads them.
    """

    def __init__(self, folder: str, groups: int, lease_seconds: float, *, shared: bool) -> None:
        self._leases = Leases(Path(folder) / FILE, groups)
        self._lease_seconds = lease_seconds
        self._machine = machine_id()
        self._shared = shared
        self._stopping = False
        self._whole: str | None = None
        self._reports: dict[tuple[int, str], Report] = {}
        self._expired = 0
        self._checked = time.monotonic()

    async def join(self, slot: int, machine: str, existing: list[str]) -> tuple[str, list[Lease]]:
        """Take in a driver. See `Leases.join`.

        Raises:
            StoreError: its disk is not that of the run, and nothing is published.
        """
        if machine != self._machine and not self._shared:
            raise StoreError(
                f"driver {slot} runs on {machine}, and the run's folder is on {self._machine}: set `rollout.shards` to "
                "a folder or a URL that all hosts reach, so that the rows of this driver can be read"
            )
        return self._leases.join(slot, machine, existing)

    async def call(
        self, slot: int, number: int, wanted: int, done: Sequence[int], faulty: Sequence[int], report: Report
    ) -> tuple[LeaseAnswer, bool, str | None]:
        """Take a driver's report, and lease groups to it. See `Leases.call`.

        Returns:
            The answer; whether the run is to stop; and why every prompt is rendered whole, if a driver found that out.
        """
        self._reports[slot, report["incarnation"]] = report
        self._whole = self._whole or report["whole"]
        answer = self._leases.call(slot, number, 0 if self._stopping else wanted, done, faulty)
        self._expire()
        return answer, self._stopping, self._whole

    async def status(self, *, stop: bool = False) -> dict[str, Any]:
        """The counts of groups, the newest reports, and the CPU time of this process. stop: have all drivers stop."""
        self._stopping |= stop
        self._expire()
        return {
            "counts": self._leases.counts,
            "reports": dict(self._reports),
            "expired": self._expired,
            "cpu": sum(os.times()[:2]),
        }

    def _expire(self) -> None:
        now = time.monotonic()
        if now - self._checked > self._lease_seconds / 10:
            self._checked = now
            self._expired += len(self._leases.expire(now - self._lease_seconds))


async def ask(actor: Any, silence: float, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of the coordinator's actor, and again while it is being started again.

    Args:
        actor: The handle of the actor.
        silence: Seconds without an answer after which the call fails.
        method: A method of `Coordinator`.
        arguments: Its arguments.
        named: Those with names.

    Raises:
        StoreError: there was no answer.
        EngineError: what the method raised.
    """
    import ray.exceptions as lost

    began = time.monotonic()
    while True:
        try:
            return await getattr(actor, method).remote(*arguments, **named)
        except lost.RayTaskError as error:
            raise engine_error(error) from error
        except (lost.ActorUnavailableError, lost.ActorDiedError, lost.WorkerCrashedError) as error:
            if time.monotonic() - began > silence:
                raise StoreError(f"the coordinator of this run does not answer for {silence:g} s: {error}") from error
            await asyncio.sleep(PAUSE)


class Driver:
    """A driver: an actor whose only long method runs an event loop of its own.

    Its constructor takes nothing, so that Ray can start it again after the node of its arguments is lost.
    """

    def run(self, setup: Setup, slot: int, coordinator: Any, silence: float) -> Done:
        """Run episodes until no group is left.

        Args:
            setup: What every driver is given.
            slot: Its number.
            coordinator: The handle of the coordinator.
            silence: Seconds without an answer of the coordinator after which the driver stops.

        Raises:
            EngineError: as `run_driver`.
        """
        from engine.logs import configure_logging

        prepare_process(setup)
        configure_logging(json=True)
        return asyncio.run(run_driver(setup, slot, partial(ask, coordinator, silence)))


def engine_error(error: Any) -> BaseException:
    """The engine's own exception in an error of a Ray task; the error itself if it is another one."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EngineError):
        return cause
    return error if cause is None else StoreError(f"a driver failed: {type(cause).__name__}: {cause}")
