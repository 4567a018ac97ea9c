"""The drivers of one spec, as the engine asks for them (`engine.runner.processes.Processes`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.plugins.drivers import rules
from engine.plugins.drivers.session import of_driver
from engine.plugins.drivers.spec import DriversSpec
from engine.spec.added import spec_facts
from engine.store.find import is_divided

if TYPE_CHECKING:
    import asyncio

    from engine.api.progress import Progress
    from engine.backends.weights import ServerWeights
    from engine.plugins.drivers.driver_runner import DriverRunner
    from engine.runner.summary import RunResult
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.spec.text.diagnostic import DataPath
    from engine.store.store import RunStore


class DriverProcesses:
    """`rollout.drivers` drivers, none of them started."""

    rule: str = rules.RULE
    path: DataPath = ("rollout", "drivers")

    def __init__(self, loaded: LoadedSpec) -> None:
        self._loaded = loaded
        self._runner: DriverRunner | None = None
        self.optional = DriversSpec.of(loaded.spec).drivers == "auto"

    @property
    def alone(self) -> LoadedSpec:
        """As in `Processes`."""
        return of_driver(self._loaded, 1, 0)

    def refuse_resume(self, store: RunStore, *, retry: bool) -> None:
        """As in `Processes`. The store is closed if the resume is refused.

        Raises:
            StoreError: One process began the run, or something in the spec or the command needs one.
        """
        spec = self._loaded.spec
        try:
            if not is_divided(store.folder) and store.statuses():
                raise StoreError(
                    f"{store.folder} was begun by one process, and is continued by one: leave out `rollout.drivers`"
                )
            refused = [message for facts in spec_facts(spec) for message, _, _ in facts.one_process]
            if retry:
                refused = ["--retry-failed is not supported in a run with several drivers: leave it out"]
            if refused:
                raise StoreError(refused[0])
            rules.refuse(self._loaded, rules.problems(spec))
        except BaseException:
            store.close()
            raise

    def refuse_training(self) -> None:
        """As in `Processes`."""
        rules.refuse(self._loaded, rules.training_problems(self._loaded.spec))

    def refuse_serving(self, store: RunStore) -> None:
        """As in `Processes`.

        Raises:
            StoreError: The run is one of several drivers.
        """
        from engine.plugins.drivers.leases import FILE

        if DriversSpec.of(self._loaded.spec).shards is not None:
            message = "a service publishes no shards; its drivers run on its machine"
            fix = "remove it, or set `rollout.drivers: 1`"
            rules.refuse(self._loaded, [(message, ("rollout", "shards"), fix)])
        if (store.folder / FILE).exists():
            raise StoreError(f"{store.folder} is a run of several drivers: `engine run --resume` continues it")

    async def run(
        self,
        tasks: TaskList,
        store: RunStore,
        progress: Progress,
        *,
        keep_going: bool,
        stop: asyncio.Event,
    ) -> RunResult:
        """As in `Processes`."""
        from engine.plugins.drivers.run_command import drive_many
        from engine.plugins.drivers.sharded import note_status

        note_status(store.folder, "running")
        try:
            return await drive_many(self._loaded, tasks, store, progress, keep_going=keep_going, stop=stop)
        finally:
            store.close()
            note_status(store.folder)

    def episodes(self, store: RunStore, weights: ServerWeights | None, *, keep_going: bool) -> DriverRunner:
        """As in `Processes`."""
        from engine.plugins.drivers.driver_runner import DriverRunner

        self._runner = DriverRunner(self._loaded, store, weights, keep_going=keep_going)
        return self._runner

    async def follow(self, weights: ServerWeights) -> None:
        """As in `Processes`."""
        if self._runner is not None:
            await self._runner.follow(weights)
