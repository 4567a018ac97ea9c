"""Episodes of the engine by verl's own agent loop managers on a local Ray: run by a Python that has verl.

The workers are verl's Ray actors, the queue of the V1 trainer is the real TransferQueue. Only verl's servers are replaced, by `Client`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from verl_training import Client, configured


def main(cases: str) -> None:
    """Run the cases and print what came out of each.

    Args:
        cases: JSON, a list of objects: `manager` (`v1` or `v0`), `loop` (the YAML file), `rows` (verl's data rows), `model` (its folder), `workers` (how
            many), and `changes` of verl's configuration.
    """
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = []
    for number, case in enumerate(json.loads(cases)):
        changes = [
            "actor_rollout_ref.model.path=" + case["model"],
            f"actor_rollout_ref.rollout.agent.num_workers={case['workers']}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=engine",
            "actor_rollout_ref.rollout.agent.agent_loop_config_path=" + case["loop"],
            "trainer.v1.trainer_mode=sync",
            *case["changes"],
        ]
        config = configured("", "", *changes)
        if not number:
            tq.init(config.transfer_queue)
        found.append({"v1": _v1, "v0": _v0}[case["manager"]](config, case["rows"], f"case{number}"))
    print(json.dumps(found))
    sys.stdout.flush()
    tq.close()
    ray.shutdown()


def _v1(config: Any, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """AgentLoopManagerTQ, its workers, and the advantages that verl's trainer computes from their rows."""
    import ray
    import transfer_queue as tq
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

    uids = [f"{name}-{place}" for place in range(len(rows))]
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 4}] * len(rows)
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    columns = {key: NonTensorStack(*(row[key] for row in rows)) for key in rows[0]}
    columns |= {"uid": NonTensorStack(*uids), "global_steps": NonTensorData(4)}
    manager = AgentLoopManagerTQ.create(config, Client())
    manager.generate_sequences(TensorDict(columns, batch_size=[len(rows)]))
    while True:
        listed = {key: tag for key, tag in tq.kv_list("train")["train"].items() if key.startswith(name)}
        if all(listed[uid]["status"] in ("finished", "failure") for uid in uids):
            break
        time.sleep(0.05)
    statuses = [listed[uid]["status"] for uid in uids]
    for worker in manager.agent_loop_workers:
        ray.kill(worker)
    keys = sorted(key for key in listed if key not in uids)
    if not keys:
        return {"statuses": statuses, "rows": []}
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[listed[key] for key in keys])
    sampled = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["rollout_log_probs"])
    own = TensorDict({"old_log_probs": sampled["rollout_log_probs"]}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id="train", fields=own)
    trainer_class = get_trainer_cls("sync")
    trainer = trainer_class.__new__(trainer_class)
    trainer.config = config
    trainer._compute_advantage(batch, {})
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    names = ("input_ids", "response_mask", "rollout_log_probs", "rm_scores", "advantages")
    extras, turns = ([getattr(each, "data", each) for each in data[name]] for name in ("extra_fields", "num_turns"))
    made = [
        {"key": key, "tag": listed[key], "extra": extras[place], "turns": int(turns[place])}
        | {each: data[each][place].tolist() for each in names}
        for place, key in enumerate(keys)
    ]
    return {"statuses": statuses, "rows": made}


def _v0(config: Any, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """AgentLoopManager and its workers (DataProto), as verl's older trainer calls them."""
    import numpy as np
    import ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.protocol import DataProto

    samples = config.actor_rollout_ref.rollout.n
    repeated = [row | {"uid": f"{name}-{place}"} for place, row in enumerate(rows) for _ in range(samples)]
    columns = {key: np.array([row[key] for row in repeated] + [None], dtype=object)[:-1] for key in repeated[0]}
    manager = AgentLoopManager.create(config, Client())
    made = manager.generate_sequences(DataProto(non_tensor_batch=columns, meta_info={"global_steps": 4}))
    for worker in manager.agent_loop_workers:
        ray.kill(worker)
    tensors = {key: made.batch[key].tolist() for key in made.batch.keys()}  # noqa: SIM118  (a TensorDict iterates over entries)
    names = ("uid", "episode_id", "min_global_steps", "max_global_steps", "turn_scores")
    return {"tensors": tensors} | {each: made.non_tensor_batch[each].tolist() for each in names}


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main(sys.argv[1])
