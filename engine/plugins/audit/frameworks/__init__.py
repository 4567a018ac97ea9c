"""The frameworks whose rows are read: one file each, and one entry in `FRAMEWORKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.plugins.audit.files import Document
from engine.plugins.audit.frameworks import areal, skyrl, slime, trl, verl
from engine.plugins.audit.rows import ForeignRow


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose rows are read."""

    title: str
    files: str
    """The files that are read, in words."""
    read: Callable[[Document], list[ForeignRow]]


FRAMEWORKS: Mapping[str, Framework] = {
    "verl": Framework("verl", "a DataProto of `save_to_disk`; JSON lines of `trainer.rollout_data_dir`", verl.read),
    "trl": Framework(
        "TRL", "dicts or rows with `prompt_ids` and `completion_ids`; Parquet of `log_completions`", trl.read
    ),
    "slime": Framework("slime", "files of `--save-debug-rollout-data`", slime.read),
    "skyrl": Framework(
        "SkyRL", "a `GeneratorOutput`; the `TrainingInputBatch` of `trainer.dump_data_batch`", skyrl.read
    ),
    "areal": Framework("AReaL", "tensors of a workflow; JSON lines of `rollout.dump_to_file`", areal.read),
}
"""The frameworks by the name that `--from` takes."""
