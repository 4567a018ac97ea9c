"""Runs the episodes of verl's prompts, and writes their rows to TransferQueue: verl's `agent_loop_manager_class`.

One row of verl's data set is one task: `extra_info.task` is its id (`write_tasks` writes such a file). A prompt's group
is run as a whole; its rows are written, and then the prompt is `finished`. A group without a row is a `failure`, and
verl asks for another one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from engine.errors import EngineError, TrainError
from engine.plugins.trainers.library import value_of
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.verl.backend import VerlBackend
from engine.plugins.trainers.verl.rows import group_rows
from engine.plugins.trainers.verl.settings import refuse_settings
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger(__name__)
_COLUMNS = ("raw_prompt", "data_source", "reward_model", "extra_info", "index")
"""The columns of the data set that verl's metrics and dumps read."""


class EngineManager:
    """The agent loop manager; verl makes it with `create`.

    Args:
        config: verl's whole configuration; `engine.spec` is the spec's path, `engine.folder` the folder of the run
            store.
        llm_client: verl's client of its servers.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: a setting of verl or of the spec would be lost; the message names all of them.
    """

    def __init__(self, config: Any, llm_client: Any) -> None:
        path, folder = value_of(config, "engine.spec"), value_of(config, "engine.folder")
        if path is None or folder is None:
            raise TrainError(
                "verl's configuration has no `engine.spec` or no `engine.folder`; add "
                "`+engine.spec=SPEC +engine.folder=FOLDER`",
                kind="train_setup",
            )
        loaded = load_spec(Path(path))
        self._episodes = TrainerRollouts(loaded, folder, "verl")
        refuse_settings(config, loaded, self._episodes.format.vision)
        self.backend = VerlBackend.of(config, llm_client, self._episodes)
        """What samples; its `stats` count replies whose versions collapsed."""
        self._samples = loaded.spec.rollout.samples_per_task
        self._running: set[Future[None]] = set()

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> EngineManager:
        """Make the manager and open its run store. Teachers and workers of rewards are not used.

        Raises:
            EngineError: as `EngineManager` and `TrainerRollouts.start`.
        """
        manager = cls(config, llm_client)
        manager._episodes.loop.call(manager._episodes.start(manager.backend))
        log.info("verl's rollouts are the engine's", spec=str(manager._episodes.loaded.path))
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        """Start the groups of a batch of prompts, and return at once.

        Args:
            prompts: verl's TensorDict with one entry for each prompt.

        Raises:
            TrainError: kind `train_setup`: a prompt has no task, an id that rows cannot have, or is for validation.
        """
        import tensordict

        if "validate" in prompts and prompts["validate"]:  # noqa: RUF019  (`get` of a TensorDict gives a wrapper)
            raise TrainError("this manager runs no validation; evaluate with `engine eval`", kind="train_setup")
        step = int(prompts["global_steps"])
        for place in range(len(prompts)):
            one = prompts[place]
            values = {name: one[name] for name in one.keys()}  # noqa: SIM118  (a TensorDict iterates over entries)
            plain = {
                name: value.data if isinstance(value, tensordict.NonTensorData) else value
                for name, value in values.items()
            }
            uid, task = str(plain["uid"]), (plain.get("extra_info") or {}).get("task")
            if "_" in uid:
                raise TrainError(
                    f"the prompt's uid {uid!r} holds `_`, which verl's keys of rows split at", kind="train_setup"
                )
            if task not in self._episodes.tasks:
                raise TrainError(
                    f"`extra_info.task` of a prompt is {task!r}, which is not a task of {self._episodes.loaded.path}; "
                    "make the data file with `write_tasks`",
                    kind="train_setup",
                )
            columns = {name: plain[name] for name in _COLUMNS if name in plain}
            future = self._episodes.loop.submit(self._group(uid, task, step, columns))
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    async def _group(self, uid: str, task: str, step: int, columns: Mapping[str, Any]) -> None:
        """Run a group and write its rows. Every end of it is a status of its prompt, so the trainer never waits for
        nothing."""
        status = "failure"
        try:
            await self._status(uid, "running")
            group = await self._episodes.group(task, self._samples, step)
            if group.rows:
                trajectories = {trajectory.episode_id: trajectory for trajectory in group.trajectories}
                rows = uid, step, group.rows, trajectories, columns, self._episodes.pixels
                await asyncio.to_thread(lambda: _put(*group_rows(*rows)))
                status = "finished"
            else:
                log.error(group.why_no_rows, task=group.task_id, faults=self._episodes.faults[-3:])
        except EngineError as error:
            log.error("the group failed", task=task, error=str(error))
        except Exception:
            log.exception("the group failed", task=task)
        await self._status(uid, status)

    @staticmethod
    async def _status(uid: str, status: str) -> None:
        import transfer_queue

        await asyncio.to_thread(transfer_queue.kv_put, key=uid, partition_id="train", tag={"status": status})

    def close(self) -> None:
        """Wait for the running groups, and close the run store."""
        for future in list(self._running):
            future.result()
        self._episodes.stop()


def _put(keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]]) -> None:
    import transfer_queue
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)


def write_tasks(spec: LoadedSpec | Path | str, path: Path | str) -> int:
    """Write the Parquet file that `data.train_files` names, and return its number of rows.

    The column `prompt` holds the task's id, and the model does not see it: the engine makes prompts from the spec.

    Raises:
        SpecError: the spec is invalid, or its tasks cannot be read.
    """
    loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec)
    ids = [task.id for task in load_tasks(loaded)]
    rows = [
        {
            "data_source": loaded.spec.name,
            "prompt": [{"role": "user", "content": name}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "task": name},
        }
        for index, name in enumerate(ids)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return len(ids)
