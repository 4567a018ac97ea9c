"""One step of AReaL up to its advantages, on episodes of a spec: its workflow executor and its actor, with an inference engine that replies by a
script. Run by the Python of `AREAL_PYTHON`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]
TASKS = ("t2", "t0", "t1")


def main(spec_file: str, folder: str) -> None:
    from areal.api import ModelRequest, ModelResponse, RolloutWorkflow
    from areal.api.cli_args import GRPOConfig, InferenceEngineConfig, PPOActorConfig
    from areal.infra.workflow_executor import WorkflowExecutor
    from areal.trainer.ppo.actor import PPOActor
    from areal.utils.dynamic_import import import_from_string
    from scripted_sampler import ScriptedSampler

    from engine.errors import TrainError
    from engine.plugins.trainers.areal import task_dataset, watch, workflow_arguments
    from engine.plugins.trainers.areal.rows import SUMS

    actor_config = PPOActorConfig(
        experiment_name="e", trial_name="t", path="", discount=0.0, kl_ctl=0.0, reward_bias=-0.5, reward_scaling=3.0
    )
    rollout = InferenceEngineConfig(
        experiment_name="e", trial_name="t", backend="sglang:d1", consumer_batch_size=3, max_head_offpolicyness=8, check_trajectory_format=True
    )  # fmt: skip
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=actor_config, rollout=rollout)
    arguments = workflow_arguments(config, spec_file, folder)
    kind = import_from_string("engine.plugins.trainers.areal.EngineWorkflow")
    assert issubclass(kind, RolloutWorkflow)
    workflow = kind(**json.loads(json.dumps(arguments)))
    assert workflow.episodes is kind(**arguments).episodes

    class Engine(ScriptedSampler):
        """What RemoteInfEngine.agenerate returns; an update interrupts each reply after its first token."""

        asked: list[ModelRequest] = []

        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            self.asked.append(req)
            ids, logprobs = self.reply(req.rid, req.input_ids, req.gconfig.max_new_tokens)
            versions = [4] + [5] * (len(ids) - 1)
            return ModelResponse(
                input_tokens=req.input_ids, output_tokens=ids, output_logprobs=logprobs, output_versions=versions
            )

        def get_version(self) -> int:
            return 5

    engine = Engine(workflow.episodes.rollouts.format)
    executor = WorkflowExecutor(rollout, engine)
    executor.initialize()
    try:
        batch = executor.rollout_batch([{"task": task} for task in TASKS], workflow)
    finally:
        loop = workflow.episodes._loop
        asyncio.run_coroutine_threadsafe(workflow.episodes.close(), loop).result()
        executor.destroy()
    actor = PPOActor(actor_config, None)
    watch(actor)
    compute = actor.compute_advantages
    watch(actor)
    assert actor.compute_advantages is compute
    given = [dict(each) for each in batch]
    computed = actor.compute_advantages([dict(each) for each in batch])
    assert not any(name in each for each in computed for name in SUMS)
    told = []
    for before, after in zip(given, computed, strict=True):
        for place in range(len(before["input_ids"])):
            mask = after["loss_mask"][place].bool()
            there = before["loss_mask"][place].bool()
            told.append({"ids": before["input_ids"][place][there].tolist(), "logprobs": after["logprobs"][place][mask].tolist(),
                         "advantages": after["advantages"][place][mask].tolist(), "versions": before["versions"][place][there].tolist(),
                         "reward": float(before["rewards"][place])})  # fmt: skip
    said = []
    for change in ({"values": batch[0]["values"] * 0.5}, {"engine_trained": None}):
        spoilt = [dict(each) for each in batch]
        spoilt[0] |= change
        for each in spoilt:
            if "engine_trained" in change:
                del each["engine_trained"]
        try:
            actor.compute_advantages(spoilt)
            said.append("")
        except TrainError as error:
            said.append(str(error))
    first = engine.asked[0].gconfig
    print(json.dumps({"rows": told, "said": said, "sampled": engine.sampled, "tasks": task_dataset(spec_file)["task"][:],
                      "gconfig": [first.temperature, first.max_new_tokens, first.n_samples, first.greedy]}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
