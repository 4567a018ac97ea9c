"""verl's own path from rows of TransferQueue to advantages, over recorded rows: run by a Python that has verl."""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_training import configured

STEP = 7


def main(*files: str) -> None:
    """Print what verl's trainer computes.

    Args:
        files: A file of rows, the spec, and again.
    """
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init(configured("", "").transfer_queue)
    print(json.dumps([_told(*files[at : at + 2]) for at in range(0, len(files), 2)]))
    sys.stdout.flush()
    tq.close()
    ray.shutdown()


def _told(rows_file: str, spec_file: str) -> dict[str, Any]:
    import transfer_queue as tq
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1 import get_trainer_cls

    import engine.plugins.trainers.verl.trainer  # noqa: F401  (registers the trainer)
    from engine.errors import TrainError
    from engine.plugins.trainers.verl.manager import _put
    from engine.plugins.trainers.verl.rows import COLUMN, group_rows
    from engine.store import RunStore
    from engine.store.rows.row import RowEpisode, TrainingRow

    names = ("input_ids", "loss_mask", "weight_versions", "logprobs", "advantages")
    of_episode = ("task_id", "episode_id", "sample_index")
    rows = [
        TrainingRow.of_tokens(
            **{name: row[name] for name in names}, episode=RowEpisode(**{name: row[name] for name in of_episode})
        )
        for row in json.loads(Path(rows_file).read_text())
    ]
    (folder,) = Path(spec_file).parent.glob("runs/*/rollouts")
    ended = {each.episode_id: each for each in RunStore.open(folder, readonly=True).trajectories()}
    name = Path(spec_file).parent.name.replace("_", "-")
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    for number, (_, each) in enumerate(groupby(rows, key=lambda row: row.episode.task_id)):
        group = list(each)
        handed = group_rows(f"{name}-{number}", STEP, group, ended, {})
        _put(*handed)
        keys += handed[0]
        tags += handed[2]
    batch = upsample_batch_to_divisible_size(KVBatchMeta(partition_id="train", keys=keys, tags=tags), len(keys) + 3, 0)
    # verl's actor writes this column before the advantages.
    sampled = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    own = TensorDict({"old_log_probs": sampled["rollout_log_probs"]}, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=own)
    trainer_class = get_trainer_cls("engine")
    trainer = trainer_class.__new__(trainer_class)
    trainer.config = configured(spec_file, str(folder))
    trainer._compute_advantage(batch, {})
    found = tq.kv_batch_get(keys=keys, partition_id="train")
    masks = [each.bool() for each in found["response_mask"]]
    told = [
        {"ids": found["responses"][place][mask].tolist(),
         "all_ids": found["input_ids"][place].tolist(),
         "advantages": found["advantages"][place][mask].tolist(),
         "elsewhere": float(found["advantages"][place][~mask].abs().sum()),
         "logprobs": found["rollout_log_probs"][place][mask].tolist(),
         "versions": [tags[place]["min_global_steps"], tags[place]["max_global_steps"]],
         "score": float(found["rm_scores"][place].sum())}
        for place, mask in enumerate(masks)
    ]  # fmt: skip
    changed = TensorDict({COLUMN: found[COLUMN] * 0.5}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id="train", fields=changed)
    said = ""
    try:
        trainer._compute_advantage(batch, {})
    except TrainError as error:
        said = str(error)
    padding = tq.kv_batch_get(keys=batch.keys[len(keys) :], partition_id="train", select_fields=["advantages"])
    return {"rows": told, "padding": [each.tolist() for each in padding["advantages"]], "lost": said}


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main(*sys.argv[1:])
