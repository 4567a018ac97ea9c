"""AReaL's own path from trajectories to advantages, over recorded rows: run by the Python of `AREAL_PYTHON`."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any


def main(rows_file: str, spec_file: str) -> None:
    from areal.api.cli_args import GRPOConfig, NormConfig, PPOActorConfig
    from areal.infra.workflow_executor import check_trajectory_format
    from areal.trainer.ppo.actor import PPOActor
    from areal.utils.data import concat_padded_tensors

    from engine.errors import TrainError
    from engine.plugins.trainers import areal as ours
    from engine.plugins.trainers.handover import BatchSums, HandedRow
    from engine.spec.load import load_spec
    from engine.store.rows.row import RowEpisode, TrainingRow

    recorded = json.loads(Path(rows_file).read_text())
    names = ("input_ids", "loss_mask", "weight_versions", "logprobs", "advantages")
    rows = [
        TrainingRow.of_tokens(**{name: row[name] for name in names}, episode=RowEpisode(task_id=row["task_id"]))
        for row in recorded
    ]
    loaded = load_spec(spec_file)
    actor = PPOActorConfig(
        experiment_name="e", trial_name="t", path="", discount=0.0, kl_ctl=0.0, reward_bias=-0.5, reward_scaling=3.0
    )
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=actor)
    ours.refuse_settings(config, loaded)
    named = {}
    for path, value in {
        "actor.discount": 1.0,
        "actor.kl_ctl": 0.1,
        "actor.reward_norm": NormConfig(),
        "actor.adv_norm": NormConfig(),
        "actor.overlong_reward_penalty": True,
        "actor.mask_no_eos_with_zero": True,
        "critic": object(),
        "gconfig.n_samples": 4,
        "actor.temperature": 0.5,
    }.items():
        owner: Any = config
        *parts, last = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        before = getattr(owner, last, None)
        setattr(owner, last, value)
        try:
            ours.refuse_settings(config, loaded)
            named[path] = ""
        except TrainError as error:
            named[path] = str(error)
        setattr(owner, last, before)

    trajectories = []
    for _, pairs in groupby(zip(rows, recorded, strict=True), key=lambda pair: pair[0].episode.task_id):
        group = list(pairs)
        made = ours.trajectory([row for row, _ in group], [columns["reward"] for _, columns in group], actor=actor)
        assert check_trajectory_format(made)
        trajectories.append(made)
    handed = BatchSums.of_rows([*map(HandedRow.of, rows)])
    given = concat_padded_tensors(trajectories)
    versions = [line[mask == 1].tolist() for line, mask in zip(given["versions"], given["loss_mask"], strict=True)]
    batch = PPOActor(actor, None)._compute_advantages(dict(given))
    handed.check(ours.sums_of_batch(batch), "AReaL", "nothing here")
    mask = batch["loss_mask"].bool()
    told = [
        {"ids": given["input_ids"][place].roll(-1)[mask[place]].tolist(),
         "advantages": batch["advantages"][place][mask[place]].tolist(),
         "logprobs": batch["logprobs"][place][mask[place]].tolist(), "versions": versions[place],
         "reward": float(batch["rewards"][place])}
        for place in range(len(rows))
    ]  # fmt: skip
    said = ""
    try:
        handed.check(ours.sums_of_batch(batch | {"advantages": batch["advantages"] * 0.5}), "AReaL", "a test")
    except TrainError as error:
        said = str(error)
    print(json.dumps({"rows": told, "named": named, "lost": said}))


if __name__ == "__main__":
    main(*sys.argv[1:])
