"""verl's trainer with stand-ins for its servers and its actor, which need GPUs: a module of VERL_USE_EXTERNAL_MODULES.

All else of `verl.trainer.main_ppo` is verl's own: its task runner on Ray, data loader, replay buffer, padding, advantages, metrics and steps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl_page import Solver

from engine.plugins.trainers.verl.trainer import EnginePPOTrainer


class Failing(Solver):
    """As `Solver`; the first group of task 3 meets a server that is down."""

    async def generate(self, request_id: str, **words: Any) -> Any:
        if request_id.startswith("3/"):
            raise ConnectionError("the server is down")
        return await super().generate(request_id, **words)


class Actor:
    """The worker group of the actor: its log-probs are the sampler's, and its updates are written to the file of VERL_CPU_LOG."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}

    def compute_log_prob(self, batch: Any) -> Any:
        """Write `log_probs` and `entropy` of whole sequences; position t holds those of token t + 1."""
        names = ["input_ids", "rollout_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        rows = []
        for ids, told in zip(data["input_ids"], data["rollout_log_probs"], strict=True):
            row = torch.zeros(len(ids))
            row[len(ids) - len(told) - 1 : -1] = told
            rows.append(row)
        whole = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"log_probs": whole, "entropy": whole}, batch_size=len(rows))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def update_actor(self, batch: Any) -> dict[str, Any]:
        names = ["input_ids", "response_mask", "advantages", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        rows = [
            {"key": key, "padding": bool(tag.get("is_padding")), "step": tag["global_steps"], "version": tag["max_global_steps"]}
            | {name: data[name][place].tolist() for name in names[:3]}
            | {"episode": getattr(data["extra_fields"][place], "data", data["extra_fields"][place]).get("episode_id")}
            for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
        ]  # fmt: skip
        with Path(os.environ["VERL_CPU_LOG"]).open("a") as stream:
            print(json.dumps(rows), file=stream)
        return {"metrics": {"mfu": [0.0], "rows": [len(rows)]}}


class CpuTrainer(EnginePPOTrainer):
    """The registered trainer without the parts that need GPUs."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self._init_resource_pool_mgr()
        client = Failing(self.tokenizer)
        self.actor_rollout_wg = Actor()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.llm_server_manager = SimpleNamespace(get_client=lambda: client)
        self.checkpoint_manager = SimpleNamespace(
            sleep_replicas=lambda: None, update_weights=lambda step: setattr(client, "version", step)
        )
        self._load_checkpoint()


TRAINER_REGISTRY["engine"] = CpuTrainer
