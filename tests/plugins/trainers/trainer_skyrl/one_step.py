"""One step of SkyRL up to its advantages, on episodes of a spec: its experiment, data loader, generator input and trainer, with a client that
replies by a script. Run by the Python of `SKYRL_PYTHON`."""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # else pydantic refuses SkyRL's types on Python 3.11
sys.path[:0] = [str(Path(__file__).parents[1])]


def main(spec_file: str, folder: str) -> None:
    from scripted_sampler import ScriptedSampler
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.generators.utils import prepare_generator_input

    from engine.errors import TrainError
    from engine.plugins.trainers.skyrl import EngineGenerator, EnginePPOExp
    from engine.spec.load import load_spec

    loaded = load_spec(spec_file)
    samples = loaded.spec.rollout.samples_per_task
    cfg = SkyRLTrainConfig()
    cfg.trainer.algorithm.advantage_estimator = "engine"
    cfg.trainer.eval_interval = -1
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = 3
    cfg.trainer.policy.model.path = loaded.spec.model.path
    cfg.trainer.placement.colocate_all = False
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.generator.n_samples_per_prompt = samples
    cfg.data.dataloader.num_workers = 0
    cfg.data.dataloader.persistent_workers = False
    experiment = EnginePPOExp(cfg, loaded, folder)
    assert isinstance(experiment, BasePPOExp)

    class Client(ScriptedSampler):
        """What RemoteInferenceClient.generate returns, for one prompt of a call."""

        ended: typing.ClassVar[list[str]] = []

        async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
            (prompt,), (session,) = input_batch["prompt_token_ids"], input_batch["session_ids"]
            params = input_batch["sampling_params"]
            ids, logprobs = self.reply(session, prompt, params["max_tokens"])
            return {"responses": [""], "response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": [logprobs]}

        async def finish_session(self, session_id: str) -> None:
            self.ended.append(session_id)

    client = Client(experiment.episodes.format)
    generator = experiment.get_generator(cfg, experiment.tokenizer, client)
    assert isinstance(generator, GeneratorInterface)
    assert isinstance(generator, EngineGenerator)
    trainer = experiment.get_trainer(
        cfg=cfg,
        tracker=None,
        tokenizer=experiment.tokenizer,
        train_dataset=experiment.train_dataset,
        eval_dataset=experiment.eval_dataset,
        inference_engine_client=client,
        generator=generator,
        colocate_pg=None,
    )
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 5)  # SkyRL adds three rows of padding
    prompts = next(iter(trainer.train_dataloader))
    params = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    given, uids = prepare_generator_input(prompts, samples, params, "gsm8k", "train", 3)

    async def generate() -> Any:
        try:
            return await trainer.generate(given)
        finally:
            await generator.close()

    output = asyncio.run(generate())
    metrics = dict(trainer.all_metrics)
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    rewards = {name: value for name, value in trainer.all_metrics.items() if name.startswith("reward/")}
    batch["values"] = None
    batch = trainer.compute_advantages_and_returns(batch)
    told = []
    for place, extra in enumerate(given["env_extras"]):
        mask = batch["loss_mask"][place].bool()
        ids = batch["sequences"][place][-len(mask) :][mask]
        told.append({"slot": [extra["task"], place % samples], "ids": ids.tolist(), "advantages": batch["advantages"][place][mask].tolist(),
                     "logprobs": batch["rollout_logprobs"][place][mask].tolist()})  # fmt: skip
    batch["rewards"] = batch["rewards"] * 0.5
    said = ""
    try:
        trainer.compute_advantages_and_returns(batch)
    except TrainError as error:
        said = str(error)
    print(json.dumps({"rows": told, "engine": metrics, "rewards": rewards, "lost": said, "ended": sorted(client.ended),
                      "sampled": client.sampled}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
