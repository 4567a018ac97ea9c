"""Writes verl's data file for the tasks of a spec: one row for each task, with its id in `extra_info.task`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks


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
