"""Runs the episodes of slime's samples over slime's SGLang router, on one loop in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from engine.backends.sglang.client import SGLangBackend
from engine.errors import TrainError
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.slime.samples import samples_of
from engine.plugins.trainers.slime.settings import Settings, refuse_arguments, router_url
from engine.schemas.backend import SGLangBackendSpec

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future
    from pathlib import Path

    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.train.batches import GroupBuilder

_OPEN: dict[Settings, Episodes] = {}
_OPENING = threading.Lock()


class Episodes(TrainerRollouts):
    """The episodes of a spec for slime. `Episodes.of(args)` gives the ones of this process.

    Args:
        spec: The spec, or the path of its file.
        folder: The folder of the training.
        args: slime's arguments.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec or an argument does not fit.
    """

    def __init__(self, spec: LoadedSpec | Path | str, folder: Path | str, args: Any) -> None:
        super().__init__(spec, folder, "slime")
        refuse_arguments(args, self.loaded)
        self._groups: dict[int, Task] = {}
        self._numbers: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-episodes", daemon=True)
        self._thread.start()
        self.submit(self.start(self._backend(router_url(args)))).result()

    @classmethod
    def of(cls, args: Any) -> Episodes:
        """The episodes of slime's arguments; the first call starts them.

        Raises:
            EngineError: as `Episodes`; or the router's servers cannot serve this spec.
        """
        settings = Settings.read(args)
        with _OPENING:
            if settings not in _OPEN:
                _OPEN[settings] = cls(settings.spec, settings.folder, args)
            return _OPEN[settings]

    @property
    def rows(self) -> GroupBuilder:
        """Builds the rows of a group, with the credit of the spec."""
        return self._rows

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine on the loop of the episodes."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def samples(self, sample: Any, *, evaluation: bool = False) -> list[Any]:
        """Run one episode of the task that `sample.prompt` names, and make its samples.

        Raises:
            TrainError: kind `train_setup`: there is no such task.
            EngineError: as `Runner.episode`.
        """
        if not isinstance(sample.prompt, str):
            raise TrainError(
                "the prompt of a sample is a list of messages; it must be the id of a task: remove --apply-chat-template",
                kind="train_setup",
            )
        task = self._task(sample, evaluation)
        number = self._numbers[task.id]
        self._numbers[task.id] += 1
        trajectory = await self._episode(task, number)
        return samples_of(sample, trajectory, self.format.decode, self.format.vision)

    def _task(self, sample: Any, evaluation: bool) -> Task:
        """The task of a sample's group. slime numbers the groups of a training; samples of evaluations have groups of their own."""
        if evaluation or sample.group_index is None:
            return self._used(sample.prompt)
        known = self._groups.get(sample.group_index)
        if known is None:
            known = self._groups[sample.group_index] = self._used(sample.prompt)
        elif known.id.rpartition("~")[0] != sample.prompt and known.id != sample.prompt:
            raise TrainError(
                f"group {sample.group_index} has the prompts {known.id!r} and {sample.prompt!r}; a group is of one task",
                kind="train_setup",
            )
        return known

    def _backend(self, url: str) -> SGLangBackend:
        declared = self.spec.backend
        assert isinstance(declared, SGLangBackendSpec)  # `refuse_arguments` has checked it
        changed = declared.model_copy(update={"urls": [url], "launch": None, "router": True})
        return SGLangBackend.open(changed, self.format, self.loaded)

    def stop(self) -> None:
        """Close the run store and the services, and end the loop. Later calls do nothing."""
        if not self._thread.is_alive():
            return
        for settings in [key for key, value in _OPEN.items() if value is self]:
            del _OPEN[settings]
        try:
            self.submit(self.close()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
