"""Begins a fork: a new run whose episodes share another run's journals up to an assistant turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.runner.processes import refuse_many
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.store.header import Fork
from engine.store.reader import RunReader

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList


def fork(source: RunReader, out: Path, turn: int, salt: int) -> tuple[LoadedSpec, TaskList, RunStore]:
    """Begin a fork of a run.

    Args:
        source: The run.
        out: The folder in which runs are stored.
        turn: Episodes share the entries before this assistant turn, from 0. An episode without this turn is copied
            completely; if it had ended, it is only finished.
        salt: Changes the sampling seeds from this turn on; 0 keeps them.

    Returns:
        (spec, tasks, store), the arguments of `Runner`. The store is open for writing.

    Raises:
        StoreError: the run is one of several processes, or the new run cannot be written.
        EngineError: the tasks cannot be read.
    """
    loaded = source.header.loaded_spec(strict=True)
    refuse_many(loaded, "a fork")
    if source.divided:
        raise StoreError(
            f"{source.shards_only or source.folder} is a run of several drivers; forks of such runs are not supported"
        )
    rollout = loaded.spec.rollout.model_copy(update={"salt": salt})
    loaded = replace(loaded, spec=loaded.spec.model_copy(update={"rollout": rollout}))
    tasks = load_tasks(loaded)
    changes = [*source.header.overrides, f"rollout.salt={salt}"]
    header = RunHeader.of(loaded, overrides=changes, fork=Fork(run=source.run_id, turn=turn))
    return loaded, tasks, RunStore.create(out, header, source)
