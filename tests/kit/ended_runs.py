"""A run in this process, from a spec to its store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.registry import open_backend
from engine.runner.runner import Runner
from engine.runner.summary import RunResult
from engine.schemas.environment import Task
from engine.schemas.trajectory import Trajectory
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate
from engine.tokens.vision import Vision


@dataclass
class Ran:
    """A run at its end. `store` is open for reading; `stats` are those of its backend."""

    loaded: LoadedSpec
    template: ChatTemplate
    store: RunStore
    result: RunResult
    runner: Runner
    stats: dict[str, Any]

    @property
    def trajectories(self) -> dict[str, Trajectory]:
        return {trajectory.episode_id: trajectory for trajectory in self.store.trajectories()}

    @property
    def only(self) -> Trajectory:
        (trajectory,) = self.store.trajectories()
        return trajectory

    @property
    def vision(self) -> Vision:
        assert self.template.vision is not None
        return self.template.vision


async def run_to_end(
    spec: Path | LoadedSpec,
    out: Path,
    *,
    header: RunHeader | None = None,
    template: ChatTemplate | None = None,
    tasks: Sequence[Task] | None = None,
    **options: Any,
) -> Ran:
    """Run a spec into a new folder under `out`.

    Args:
        spec: The spec or its file.
        out: The folder of the run's folder.
        header: The run's header in place of the spec's own.
        template: The chat format in place of the model's own.
        tasks: The tasks in place of all.
        options: What `Runner.run` takes.
    """
    loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec)
    template = template or load_format(loaded.spec.model, loaded.base)
    backend = open_backend(loaded, template)
    await backend.start()
    store = RunStore.create(out, header or RunHeader.of(loaded))
    runner = Runner(loaded, load_tasks(loaded) if tasks is None else tasks, template, backend, store)
    try:
        result = await runner.run(**options)
        stats = backend.stats()
    finally:
        await backend.close()
        store.close()
    return Ran(loaded, template, RunStore.open(store.folder, readonly=True), result, runner, stats)
