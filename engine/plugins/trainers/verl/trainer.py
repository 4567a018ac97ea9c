"""verl's synchronous V1 trainer with the engine's advantages, registered as `trainer.v1.trainer_mode=engine` when
this module is imported. The import also repairs verl for rows with images: see `fixes.py`.

Tested with verl 0.9.1; an import with a version whose class has other methods is an error. `_compute_advantage` is
extended: verl's own runs first (it also computes a rollout correction, if the configuration has one), and its
advantages are replaced by the column of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from engine.plugins.trainers.library import check_overrides, overrides
from engine.plugins.trainers.pixels import checksums_of, row_sum
from engine.plugins.trainers.verl import fixes
from engine.plugins.trainers.verl.rows import COLUMN, check_rows, refuse_foreign

fixes.apply()


@register_trainer("engine")
class EnginePPOTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's trainer; its rows come from `EngineManager`."""

    @overrides("config")
    def __init__(self, config: Any) -> None:
        config = config.copy()
        config.trainer.v1.trainer_mode = "sync"  # by which verl chooses what a synchronous trainer does
        super().__init__(config)

    @overrides("batch, metrics")
    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Write the columns `advantages` and `returns` of a batch: both are the engine's advantages.

        Raises:
            TrainError: kind `handover`: a row, a token or an advantage was lost. No update is made with the batch.
        """
        columns = given_advantages(batch)
        written = super()._compute_advantage(batch, metrics)
        fields = TensorDict(
            {name: torch.nested.as_nested_tensor(columns, layout=torch.jagged) for name in ("advantages", "returns")},
            batch_size=len(columns),
        )
        result = transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        result.extra_info.update(written.extra_info)
        return result


check_overrides(EnginePPOTrainer, PPOTrainerSync, "verl")


def given_advantages(batch: Any) -> list[torch.Tensor]:
    """The engine's advantages of each row of a batch, float32 [response]; 0.0 on verl's padding rows.

    Raises:
        TrainError: kind `handover`: the rows are not those that the engine wrote.
    """
    refuse_foreign(batch.keys, batch.tags)
    names = ["input_ids", "response_mask", COLUMN, "multi_modal_inputs"]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    ids, masks, advantages, images = ([data[name][place] for place in range(len(batch.keys))] for name in names)
    for place, tag in enumerate(batch.tags):
        if tag.get("is_padding"):  # verl copies a row and shortens only its own columns
            advantages[place] = torch.zeros(len(masks[place]), dtype=torch.float32)
    tensors = (getattr(row_images, "data", row_images) for row_images in images)
    shown = [row_sum(row, checksums_of(row_images)) for row, row_images in zip(ids, tensors, strict=True)]
    check_rows(batch.keys, batch.tags, [len(row_images) for row_images in ids], masks, advantages, shown)
    return advantages
