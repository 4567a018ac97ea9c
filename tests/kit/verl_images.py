"""Episodes with images from verl's servers to its optimizer step: run by a Python that has verl.

The queue, the agent loop workers, the trainer's advantages, the training worker and its FSDP engine are verl's own;
`Servers` stands for its vLLM servers.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from verl_on_cpu import RoutedServers, Servers, training_worker
from verl_training import configured

ACTOR = "actor_rollout_ref.actor."
SETTINGS = [
    "actor_rollout_ref.rollout.name=vllm",
    ACTOR + "strategy=fsdp2",
    ACTOR + "ppo_micro_batch_size_per_gpu=2",
    ACTOR + "fsdp_config.use_torch_compile=false",
    "+" + ACTOR + "fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    ACTOR + "optim.lr=0.01",
    ACTOR + "use_kl_loss=false",
    ACTOR + "entropy_coeff=0",
]


ROUTED = [
    "model_engine=megatron",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    ACTOR + "megatron.router_replay.mode=R3",
]


class Run:
    """One batch of a spec.

    Args:
        spec: The spec's file.
        folder: Where the run store is written.
        loop: The YAML file of the agent loop; without one, EngineManager runs the episodes.
        routed: Whether the servers report experts, and verl's Megatron actor is to replay them.
    """

    def __init__(self, spec: str, folder: str, loop: str | None = None, *, routed: bool = False) -> None:
        import ray
        import torch
        import transfer_queue

        from engine.spec.load import load_spec

        torch.set_num_threads(1)
        self.spec, self.folder = spec, Path(folder)
        self.model = str(load_spec(Path(spec)).spec.model.path)
        settings = [*(ROUTED if routed else SETTINGS), "actor_rollout_ref.model.path=" + self.model]
        self._servers = (RoutedServers if routed else Servers)(self.model)
        if loop is not None:
            agent = "actor_rollout_ref.rollout.agent."
            settings += ["trainer.v1.trainer_mode=sync", agent + "num_workers=1", agent + "default_agent_loop=engine"]
            settings += [agent + "agent_loop_config_path=" + loop]
        self.config = configured(spec, folder, *settings)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        transfer_queue.init(self.config.transfer_queue)
        self.queue = transfer_queue

    def manager(self) -> Any:
        """The agent loop manager: the engine's or verl's own."""
        if self.config.trainer.v1.trainer_mode == "engine":
            from engine.plugins.trainers.verl.manager import EngineManager

            return EngineManager.create(self.config, self._servers)
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

        return AgentLoopManagerTQ.create(self.config, self._servers)

    def batch(self, manager: Any) -> Any:
        """Run the groups of all tasks, and return the rows as verl's trainer gets them."""
        import pyarrow.parquet as pq
        from tensordict import NonTensorData, NonTensorStack, TensorDict
        from transfer_queue import KVBatchMeta

        from engine.plugins.trainers.verl.manager import write_tasks

        write_tasks(self.spec, self.folder / "tasks.parquet")
        rows = pq.read_table(self.folder / "tasks.parquet").to_pylist()
        uids = [f"uid-{place}" for place in range(len(rows))]
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 4}] * len(rows)
        self.queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        columns: dict[str, Any] = {"raw_prompt": NonTensorStack(*(row["prompt"] for row in rows))}
        columns |= {name: NonTensorStack(*(row[name] for row in rows)) for name in ("extra_info", "data_source")}
        columns |= {"uid": NonTensorStack(*uids), "index": NonTensorStack(*range(len(rows)))}
        manager.generate_sequences(TensorDict(columns | {"global_steps": NonTensorData(4)}, batch_size=[len(rows)]))
        while True:
            listed = self.queue.kv_list("train")["train"]
            if all(listed[uid]["status"] in ("finished", "failure") for uid in uids):
                break
            time.sleep(0.05)
        assert [listed[uid]["status"] for uid in uids] == ["finished"] * len(uids)
        keys = sorted(key for key in listed if key not in uids)
        return KVBatchMeta(partition_id="train", keys=keys, tags=[listed[key] for key in keys])

    def fetched(self, keys: list[str], **told: Any) -> Any:
        """Rows as a process of verl fetches them, with what verl's trainer tells about the batch."""
        from verl.utils import tensordict_utils as tu

        data = self.queue.kv_batch_get(keys=keys, partition_id="train")
        return tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=False, pad_token_id=0, **told)

    def put(self, keys: list[str], name: str, values: Any) -> None:
        """Write a column."""
        from tensordict import TensorDict

        fields = TensorDict({name: values}, batch_size=len(keys))
        self.queue.kv_batch_put(keys=keys, partition_id="train", fields=fields)


def log_probs(worker: Any, data: Any) -> list[list[float]]:
    """What verl's worker computes: position t holds the log-prob of token t + 1."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, compute_loss=False)
    return [row.tolist() for row in worker.infer_batch(data)["log_probs"].unbind()]


def told_of(run: Run, batch: Any, worker: Any) -> dict[str, Any]:
    """The rows, and verl's log-probs of all of them, of rows of one length, and of each alone."""
    rows = run.fetched(batch.keys)
    images = list(rows["multi_modal_inputs"])
    sizes = [len(ids) for ids in rows["input_ids"].unbind()]
    most = max(set(sizes), key=sizes.count)
    equal = [key for key, size in zip(batch.keys, sizes, strict=True) if size == most]
    return {
        "keys": batch.keys,
        "ids": [row.tolist() for row in rows["input_ids"].unbind()],
        "episodes": [getattr(each, "data", each)["episode_id"] for each in rows["extra_fields"]],
        "sampled": [row.tolist() for row in rows["rollout_log_probs"].unbind()],
        "masks": [row.tolist() for row in rows["response_mask"].unbind()],
        "positions": [rows["position_ids"][place].tolist() for place in range(len(batch.keys))],
        "held": [sorted(each.images) for each in images],
        "tensors": [{name: tensor.tolist() for name, tensor in each.items()} for each in images],
        "all": log_probs(worker, run.fetched(batch.keys)),
        "equal": dict(zip(equal, log_probs(worker, run.fetched(equal)), strict=True)),
        "one": [log_probs(worker, run.fetched([key]))[0] for key in batch.keys[:2]],
    }


def through_manager(spec: str, folder: str) -> None:
    """Write what came out of EngineManager's rows: log-probs, sums with exchanged images, and a step of verl."""
    from tensordict import NonTensorStack
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils import tensordict_utils as tu

    from engine.errors import TrainError

    run = Run(spec, folder)
    batch = run.batch(run.manager())
    worker = training_worker(run.model, run.config.actor_rollout_ref.actor)
    found = told_of(run, batch, worker)

    padded = upsample_batch_to_divisible_size(batch, len(batch.keys) + 1, 0)
    rows = run.fetched(padded.keys)
    run.put(padded.keys, "old_log_probs", rows["rollout_log_probs"])
    trainer_class = get_trainer_cls("engine")
    trainer = trainer_class.__new__(trainer_class)
    trainer.config = run.config
    trainer._compute_advantage(padded, {})
    images = list(rows["multi_modal_inputs"])[: len(batch.keys)]

    def said_with(*first: Any) -> str:
        """The error with these images of the first rows."""
        run.put(batch.keys, "multi_modal_inputs", NonTensorStack(*first, *images[len(first) :]))
        try:
            trainer._compute_advantage(padded, {})
        except TrainError as error:
            return str(error)
        finally:
            run.put(batch.keys, "multi_modal_inputs", NonTensorStack(*images))
        return ""

    def ordered(order: slice) -> Any:
        """The images of the first row, cut or in another order."""
        changed = copy.copy(images[0])
        changed.digests, changed.checksums = changed.digests[order], changed.checksums[order]
        return changed

    other = next(place for place, key in enumerate(batch.keys) if not key.startswith("uid-0"))
    found["said"] = {
        "rows": said_with(images[other], *images[1:other], images[0]),
        "order": said_with(ordered(slice(None, None, -1))),
        "lost": said_with(ordered(slice(1, None))),
        "none": said_with({}),
        "restored": said_with(),
    }
    parameters = dict(worker.engine.module.named_parameters())
    before = {name: each.full_tensor().clone() for name, each in parameters.items()}
    count = len(padded.keys)
    data = run.fetched(padded.keys, mini_batch_size=count, epochs=1, seed=0, global_batch_size=count)
    tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    moved = {name: bool((before[name] != each.full_tensor()).any()) for name, each in parameters.items()}
    found["step"] = {
        "grad_norm": metrics["grad_norm"],
        "moved": moved,
        "all": log_probs(worker, run.fetched(batch.keys)),
    }
    end(folder, found)


def through_loop(spec: str, folder: str, loop: str) -> None:
    """Write what came out of verl's own agent loop workers."""
    run = Run(spec, folder, loop)
    batch = run.batch(run.manager())
    end(folder, told_of(run, batch, training_worker(run.model, run.config.actor_rollout_ref.actor)))


def routed(spec: str, folder: str, *loop: str) -> None:
    """Write the experts of the rows in the queue, as verl's Megatron engine gets them."""
    run = Run(spec, folder, *loop, routed=True)
    rows = run.fetched(run.batch(run.manager()).keys)
    experts = rows["routed_experts"]
    found = {
        "episodes": [getattr(each, "data", each)["episode_id"] for each in rows["extra_fields"]],
        "dtype": str(experts.dtype),
        "sizes": [len(ids) for ids in rows["input_ids"].unbind()],
        "experts": [each.tolist() for each in experts.unbind()],
    }
    end(folder, found)


def end(folder: str, found: dict[str, Any]) -> None:
    """Write the results, and end Ray and this process."""
    import ray
    import transfer_queue

    Path(folder, "found.json").write_text(json.dumps(found))
    print("{}")
    sys.stdout.flush()
    transfer_queue.close()
    ray.shutdown()
    os._exit(0)  # the process group and the threads of the episodes


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    {"manager": through_manager, "loop": through_loop, "routed": routed}[sys.argv[1]](*sys.argv[2:])
