"""A step of SkyRL on a vision model, on episodes of a spec: its experiment, trainer, model wrapper and policy worker on a CPU, with a client that
replies by a script. Run by the Python of `SKYRL_PYTHON`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # else pydantic refuses SkyRL's types on Python 3.11
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3] / "core" / "vision")]
serde = types.ModuleType("vllm.entrypoints.serve.disagg.mm_serde")
for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.serve", "vllm.entrypoints.serve.disagg", serde.__name__):
    sys.modules[name] = serde if name == serde.__name__ else types.ModuleType(name)


def decode(text: str) -> Any:
    """In vLLM's place, which needs a GPU: what `Client.render_chat_completion` encoded."""
    tensors = torch.load(io.BytesIO(base64.b64decode(text)))
    return SimpleNamespace(get_data=lambda: tensors)


serde.decode_mm_kwargs_item = decode  # type: ignore[attr-defined]


def workers() -> tuple[Any, Any]:
    """SkyRL's model wrapper and policy worker. They import functions of flash-attn, which are called for packed rows only and need a GPU."""
    import peft  # noqa: F401  # with transformers, which looks for flash-attn as it is imported
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

    padding = types.ModuleType("flash_attn.bert_padding")
    padding.__dict__.update(pad_input=None, unpad_input=None, index_first_axis=None)
    sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), padding.__name__: padding}
    try:
        from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
        from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
    finally:
        del sys.modules["flash_attn"], sys.modules[padding.__name__]
    return HFModelWrapper, PolicyWorkerBase


def main(spec_file: str, folder: str) -> None:
    from scripted_sampler import ScriptedSampler
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.worker_utils import BaseBatchIterator
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.utils import prepare_generator_input

    from engine.errors import TrainError
    from engine.plugins.trainers.pixels import checksums_of
    from engine.plugins.trainers.skyrl import EnginePPOExp
    from engine.spec.load import load_spec
    from engine.tokens.images import open_pixels

    HFModelWrapper, PolicyWorkerBase = workers()
    loaded = load_spec(spec_file)
    samples = loaded.spec.rollout.samples_per_task
    cfg = SkyRLTrainConfig()
    cfg.trainer.algorithm.advantage_estimator = "engine"
    cfg.trainer.eval_interval = -1
    cfg.trainer.algorithm.use_kl_loss = False
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = 3
    cfg.trainer.policy.model.path = loaded.spec.model.path
    cfg.trainer.placement.colocate_all = False
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.generator.n_samples_per_prompt = samples
    cfg.data.dataloader.num_workers = 0
    cfg.data.dataloader.persistent_workers = False
    said = []
    engines, policy = cfg.generator.inference_engine, cfg.trainer.policy
    policy.sequence_parallel_size, policy.language_model_only, engines.enable_return_routed_experts = 2, True, True
    try:
        EnginePPOExp(cfg, loaded, folder)
    except TrainError as error:
        said.append(str(error))
    policy.sequence_parallel_size, policy.language_model_only, engines.enable_return_routed_experts = 1, False, False
    cfg.trainer.remove_microbatch_padding = False
    experiment = EnginePPOExp(cfg, loaded, folder)
    vision = experiment.episodes.format.vision
    assert vision is not None

    class Client(ScriptedSampler):
        """What RemoteInferenceClient returns for one prompt, and for one image."""

        rendered = 0
        right: typing.ClassVar[list[bool]] = []

        async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
            (message,) = request_payload["json"]["messages"]
            (part,) = message["content"]
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            made, _, _, count = vision.family.process(vision.processing.processor, open_pixels(data))
            Client.rendered += 1
            buffer = io.BytesIO()
            torch.save({"pixel_values": torch.from_numpy(made["pixel_values"]).bfloat16(),
                        "image_grid_thw": torch.from_numpy(made["image_grid_thw"])}, buffer)  # fmt: skip
            features = {"mm_hashes": {"image": [f"hash of {len(data)}"]}, "mm_placeholders": {"image": [{"offset": 4, "length": count}]},
                        "kwargs_data": {"image": [base64.b64encode(buffer.getvalue()).decode()]}}  # fmt: skip
            return {"token_ids": [], "features": features}

        async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
            (prompt,), (session,), (features,) = (
                input_batch[name] for name in ("prompt_token_ids", "session_ids", "mm_features")
            )
            told = features["mm_placeholders"]["image"]
            covered = [at for each in told for at in range(each["offset"], each["offset"] + each["length"])]
            there = [at for at, token in enumerate(prompt) if token == vision.placeholder_id]
            grids = [decode(text).get_data()["image_grid_thw"] for text in features["kwargs_data"]["image"]]
            sizes = [int(grid.prod()) // 4 for grid in grids]
            self.right.append(
                covered == there
                and sizes == [each["length"] for each in told]
                and len(features["mm_hashes"]["image"]) == len(told)
            )
            ids, logprobs = self.reply(session, prompt, input_batch["sampling_params"]["max_tokens"])
            return {"responses": [""], "response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": [logprobs]}

        async def finish_session(self, session_id: str) -> None:
            pass

    client = Client(experiment.episodes.format)
    generator = experiment.get_generator(cfg, experiment.tokenizer, client)
    trainer = experiment.get_trainer(
        cfg=cfg, tracker=None, tokenizer=experiment.tokenizer, train_dataset=experiment.train_dataset, eval_dataset=experiment.eval_dataset,
        inference_engine_client=client, generator=generator, colocate_pg=None,
    )  # fmt: skip
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)  # SkyRL adds two rows of padding
    prompts = next(iter(trainer.train_dataloader))
    given, uids = prepare_generator_input(prompts, samples, {}, "gsm8k", "train", 1)

    async def generate() -> Any:
        try:
            return await trainer.generate(given)
        finally:
            await generator.close()

    output = asyncio.run(generate())
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    model = HFModelWrapper(str(loaded.spec.model.path), bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    worker = SimpleNamespace(
        model=model, cfg=cfg.trainer, mesh_rank=SimpleNamespace(dp_size=1), optimizer=optimizer,
        policy_loss_fn=PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type),
        strategy=SimpleNamespace(backward=lambda loss, *_: loss.backward()),
        scheduler=SimpleNamespace(get_last_lr=lambda: [0.01]),
    )  # fmt: skip
    batch.metadata["response_length"] = batch["response_mask"].shape[1]
    micros = batch.chunk(2)
    batch["action_log_probs"] = torch.cat(
        [PolicyWorkerBase._forward_micro_batch(worker, micro)["output"] for micro in micros]
    )
    rows = len(given["env_extras"])
    told = []
    for place in range(rows):
        there = batch["attention_mask"][place].bool()
        mask = batch["loss_mask"][place].bool()
        tensors = {name: batch[name][place] for name in ("pixel_values", "image_grid_thw")}
        told.append({"ids": batch["sequences"][place][there].tolist(), "logprobs": batch["action_log_probs"][place][mask].tolist(),
                     "checksums": checksums_of(tensors), "trained": int(mask.sum())})  # fmt: skip

    batch["values"] = None
    for change in (swapped, moved):
        before = list(batch["pixel_values"].tensors), list(batch["image_grid_thw"].tensors)
        change(batch)
        try:
            trainer.compute_advantages_and_returns(batch)
            said.append("")
        except TrainError as error:
            said.append(str(error))
        batch["pixel_values"].tensors[:], batch["image_grid_thw"].tensors[:] = before
    batch = trainer.compute_advantages_and_returns(batch)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = [
        PolicyWorkerBase._forward_backward_micro(worker, BaseBatchIterator.batch_to_experience(micro), 0.25)[
            "policy_loss"
        ]
        for micro in batch.chunk(2)
    ]
    optimizer.step()
    changed = [name for name, value in model.named_parameters() if not torch.equal(before[name], value)]
    print(json.dumps({"experts": converted(experiment.tokenizer), "rows": told, "said": said, "rendered": Client.rendered, "right": client.right, "losses": losses,
                      "changed": len(changed), "visual": sum("visual" in name for name in changed)}))  # fmt: skip


def converted(tokenizer: Any) -> list[Any]:
    """What SkyRL's batch function makes of the experts of two rows, one of which has none."""
    import numpy as np
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    from engine.plugins.trainers.handover import HandedRow
    from engine.plugins.trainers.skyrl import generator_output

    experts = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    row = HandedRow([5, 6], [7, 8], [1, 1], [-1.0, -1.0], np.ones(2, np.float32), experts=experts)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_expert_indices")
    output = generator_output([row, HandedRow.empty(5)])
    found = convert_prompts_responses_to_batch_tensors(tokenizer, *[output[name] for name in names])[-1]
    return [str(found.dtype), found.tolist()]


def swapped(batch: Any) -> None:
    """The first two images of a row are exchanged."""
    pixels, grids = batch["pixel_values"].tensors, batch["image_grid_thw"].tensors
    pieces = list(torch.split(pixels[0], grids[0].prod(1).tolist()))
    pixels[0] = torch.cat([pieces[1], pieces[0], *pieces[2:]])
    grids[0] = grids[0][[1, 0, *range(2, len(grids[0]))]]


def moved(batch: Any) -> None:
    """Two rows with other images exchange them."""
    pixels, grids = batch["pixel_values"].tensors, batch["image_grid_thw"].tensors
    other = next(place for place, each in enumerate(pixels) if not torch.equal(each, pixels[0]))
    for tensors in (pixels, grids):
        tensors[0], tensors[other] = tensors[other], tensors[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
