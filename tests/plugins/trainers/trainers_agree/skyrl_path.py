"""SkyRL's own path from a GeneratorOutput to advantages, over recorded rows: run by the Python of `SKYRL_PYTHON`."""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # else pydantic refuses SkyRL's types on Python 3.11

SAMPLES = 4


def main(rows_file: str, spec_file: str) -> None:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from engine.errors import TrainError
    from engine.plugins.trainers import skyrl as ours
    from engine.plugins.trainers.handover import BatchSums, HandedRow
    from engine.spec.load import load_spec
    from engine.store.rows.row import TrainingRow

    rows = json.loads(Path(rows_file).read_text())
    names = ("input_ids", "loss_mask", "logprobs", "advantages")
    found = {
        (row["task_id"], row["sample_index"]): TrainingRow.of_tokens(**{name: row[name] for name in names})
        for row in rows
    }
    tasks = list(dict.fromkeys(row["task_id"] for row in rows))
    slots = [(task, sample) for task in tasks for sample in range(SAMPLES)]
    handed = [HandedRow.of(found[slot]) if slot in found else HandedRow.empty(1) for slot in slots]
    loaded = load_spec(spec_file)
    cfg = SkyRLTrainConfig()
    try:
        ours.refuse_settings(cfg, loaded)
        refused = ""
    except TrainError as error:
        refused = str(error)
    ours.register_estimator()
    ours.register_estimator()
    cfg.trainer.algorithm.advantage_estimator = ours.ESTIMATOR
    cfg.generator.n_samples_per_prompt = SAMPLES
    cfg.trainer.eval_interval = -1
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = len(tasks)
    ours.refuse_settings(cfg, loaded)
    named = {}
    for path, value in {
        "trainer.algorithm.use_kl_in_reward": True,
        "trainer.algorithm.advantage_batch_normalize": True,
        "trainer.algorithm.zero_variance_filter": True,
        "trainer.algorithm.dynamic_sampling.type": "filter",
        "trainer.critic.model.path": "critic",
        "trainer.fully_async.enabled": True,
        "generator.step_wise_trajectories": True,
        "generator.apply_overlong_filtering": True,
        "generator.sampling_params.temperature": 0.5,
        "generator.sampling_params.top_p": 0.5,
        "generator.n_samples_per_prompt": SAMPLES + 1,
        "generator.zero_reward_on_non_stop": True,
        "generator.chat_template_kwargs": {"enable_thinking": False},
        "trainer.eval_interval": 5,
        "trainer.algorithm.temperature": 0.5,
    }.items():
        owner: Any = cfg
        *parts, last = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        before = getattr(owner, last)
        setattr(owner, last, value)
        try:
            ours.refuse_settings(cfg, loaded)
            named[path] = ""
        except TrainError as error:
            named[path] = str(error)
        setattr(owner, last, before)

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics, trainer.critic_model = cfg, {}, None
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 5)  # SkyRL adds two rows of padding
    output = ours.generator_output(handed, {"engine/reward_mean": 0.5})
    assert output.pop("rollout_metrics") == {"engine/reward_mean": 0.5}
    validate_generator_output(len(slots), output)
    output, uids = trainer.postprocess_generator_output(output, [task for task, _ in slots])
    batch = trainer.convert_to_training_input(output, uids)
    batch["values"] = None
    batch = trainer.compute_advantages_and_returns(batch)
    BatchSums.of_rows(handed).check(ours.sums_of_batch(batch), "SkyRL", "nothing here")
    said = ""
    lost = batch["advantages"].clone()
    batch["advantages"] = lost * 0.5
    try:
        BatchSums.of_rows(handed).check(ours.sums_of_batch(batch), "SkyRL", "a test")
    except TrainError as error:
        said = str(error)
    told = []
    for place, slot in enumerate(slots):
        mask = batch["loss_mask"][place].bool()
        ids = batch["sequences"][place][-len(mask) :][mask]
        told.append({"slot": slot, "ids": ids.tolist(), "advantages": lost[place][mask].tolist(),
                     "logprobs": batch["rollout_logprobs"][place][mask].tolist()})  # fmt: skip
    print(json.dumps({"rows": told, "refused": refused, "named": named, "lost": said}))


if __name__ == "__main__":
    main(*sys.argv[1:])
