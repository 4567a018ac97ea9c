"""One step of verl's V1 trainer up to its advantages, with the engine's manager and trainer: run by a Python that has verl.

The queue is the real TransferQueue on a local Ray. Only verl's servers are replaced: `Client` gives tokens by a rule.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Client:
    """Replies in place of verl's `LLMServerClient`: four tokens by the request, with versions 3 and 4 in each third reply."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append({"request": request_id, **sampling_params})
        start = sum(map(ord, request_id)) + len(prompt_ids)
        ids = [40 + (start * 7 + place * 3) % 50 for place in range(sampling_params["max_new_tokens"])]
        newest = 4 if start % 3 == 0 else 3
        extra = {"global_steps": newest, "min_global_steps": 3, "max_global_steps": newest}
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.25 * (1 + place) for place in range(len(ids))],
            stop_reason="length",
            extra_fields=extra,
        )


def configured(spec: str, folder: str, *changes: str) -> Any:
    """verl's configuration for the manager and the trainer."""
    given = [
        "trainer.v1.trainer_mode=engine",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
        "transfer_queue.enable=true",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "+engine.spec=" + spec,
        "+engine.folder=" + folder,
        *changes,
    ]
    return composed(given)


def composed(words: list[str]) -> Any:
    """verl's configuration with settings as on the command line of `verl.trainer.main_ppo`."""
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", words)


def refusal(spec: str, folder: str, *changes: str) -> None:
    """Print what the manager refuses, or nothing."""
    from engine.errors import EngineError
    from engine.plugins.trainers.verl.manager import EngineManager

    message = ""
    try:
        EngineManager(configured(spec, folder, *changes), Client())
    except EngineError as error:
        message = str(error)
    print(json.dumps({"message": message}))


def prompts(spec: str, folder: str) -> None:
    """Print what the manager says to batches that it does not run."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    from engine.errors import EngineError
    from engine.plugins.trainers.verl.manager import EngineManager

    manager = EngineManager(configured(spec, folder), Client())
    said = {}
    for name, changes in {
        "validation": {"validate": NonTensorData(True)},
        "uid": {"uid": NonTensorStack("a_b")},
        "task": {"extra_info": NonTensorStack({"index": 0, "task": "t9"})},
        "no task": {"extra_info": NonTensorStack({"index": 0})},
    }.items():
        columns = {
            "uid": NonTensorStack("a"),
            "extra_info": NonTensorStack({"task": "t0"}),
            "global_steps": NonTensorData(1),
        }
        try:
            manager.generate_sequences(TensorDict(columns | changes, batch_size=[1]))
        except EngineError as error:
            said[name] = str(error)
    print(json.dumps(said))


def step(spec: str, folder: str, data: str) -> None:
    """Run one batch: the groups, the rows in the queue, the advantages; then once more with a row that was lost."""
    import pyarrow.parquet as pq

    from engine.plugins.trainers.verl.manager import write_tasks

    write_tasks(spec, data)
    run_batch(configured(spec, folder), Client(), pq.read_table(data).to_pylist())


def run_batch(config: Any, client: Any, rows: list[dict[str, Any]]) -> None:
    """As `step`, and print what came out.

    Args:
        config: verl's configuration; it names the manager, or EngineManager is taken.
        client: What stands for verl's client of its servers; `calls` and the manager's `stats` are printed.
        rows: The rows of verl's data set.
    """
    import ray
    import transfer_queue as tq
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.import_utils import load_class_from_fqn

    import engine.plugins.trainers.verl.trainer as registered
    from engine.errors import TrainError

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init(config.transfer_queue)
    count = len(rows)
    named = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    manager_class = load_class_from_fqn(named or "engine.plugins.trainers.verl.manager.EngineManager")
    manager = manager_class.create(
        config=config, llm_client=client, teacher_client=None, reward_loop_worker_handles=None
    )
    uids = [f"uid-{place}" for place in range(count)]
    tq.kv_batch_put(
        keys=uids, partition_id="train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 4}] * count
    )
    prompts = TensorDict(
        {
            "uid": NonTensorStack(*uids),
            "extra_info": NonTensorStack(*(row["extra_info"] for row in rows)),
            "data_source": NonTensorStack(*(row["data_source"] for row in rows)),
            "global_steps": NonTensorData(4),
        },
        batch_size=[count],
    )
    manager.generate_sequences(prompts)
    while True:
        listed = tq.kv_list("train")["train"]
        if all(listed[uid]["status"] in ("finished", "failure") for uid in uids):
            break
        time.sleep(0.05)
    keys = sorted(key for key in listed if key not in uids)
    statuses = {uid: listed[uid]["status"] for uid in uids}
    if not keys:
        manager.close()
        print(json.dumps({"statuses": statuses, "rows": []}))
        return
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[listed[key] for key in keys])
    batch = upsample_batch_to_divisible_size(batch, len(keys) + 1, 0)
    # verl's actor writes this column before the advantages; its pass over the rows needs a GPU worker.
    sampled = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    own = TensorDict({"old_log_probs": sampled["rollout_log_probs"]}, batch_size=len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=own)
    trainer_class = get_trainer_cls("engine")
    assert trainer_class is registered.EnginePPOTrainer
    trainer = trainer_class.__new__(trainer_class)
    trainer.config = config
    trainer._compute_advantage(batch, {})
    found = tq.kv_batch_get(keys=keys, partition_id="train")
    made = [
        {
            "key": key,
            "tag": listed[key],
            **{name: found[name][place].tolist() for name in ("input_ids", "response_mask", "advantages", "returns")},
            "rollout_log_probs": found["rollout_log_probs"][place].tolist(),
            "score": float(found["rm_scores"][place].sum()),
            "episode": found["extra_fields"][place]["episode_id"],
        }
        for place, key in enumerate(keys)
    ]
    padding = tq.kv_batch_get(keys=batch.keys[len(keys) :], partition_id="train", select_fields=["advantages"])
    errors = {}
    for name, cut in {"row": slice(1, None)}.items():
        lost = KVBatchMeta(partition_id="train", keys=keys[cut], tags=[listed[key] for key in keys[cut]])
        try:
            trainer._compute_advantage(lost, {})
        except TrainError as error:
            errors[name] = str(error)
    stats = manager.backend.stats()
    manager.close()
    print(
        json.dumps(
            {
                "rows": made,
                "padding": [each.tolist() for each in padding["advantages"]],
                "errors": errors,
                "stats": stats,
                "statuses": statuses,
                "calls": client.calls,
            }
        )
    )
    sys.stdout.flush()
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    {"step": step, "refusal": refusal, "prompts": prompts}[sys.argv[1]](*sys.argv[2:])
