"""A step of AReaL on a vision model, on episodes of a spec: its workflow executor, its actor and its FSDP engine on a CPU, with an inference engine
that replies by a script and a listener in the place of its servers. Run by the Python of `AREAL_PYTHON`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3] / "core" / "vision")]


def main(spec_file: str, folder: str, tasks: str) -> None:
    import torch
    from areal.api import FinetuneSpec, ModelRequest, ModelResponse
    from areal.api.cli_args import GRPOConfig, InferenceEngineConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig
    from areal.engine.fsdp_engine import FSDPPPOActor
    from areal.infra.workflow_executor import WorkflowExecutor
    from areal.utils.dynamic_import import import_from_string
    from scripted_sampler import ScriptedSampler

    from engine.errors import TrainError
    from engine.plugins.trainers.areal import backend, watch, workflow_arguments
    from engine.plugins.trainers.pixels import checksums_of
    from engine.spec.load import load_spec

    model = load_spec(spec_file).spec.model.path
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the system chooses it when torch listens: one chosen now may be taken by then
    }
    actor_config = PPOActorConfig(
        experiment_name="e", trial_name="t", path=str(model), backend="fsdp:d1", attn_impl="sdpa", dtype="float32", optimizer_dtype="float32",
        discount=0.0, kl_ctl=0.0, ppo_n_minibatches=1, gradient_checkpointing=False, disable_dropout=True,
        optimizer=OptimizerConfig(type="adam", lr=0.01, warmup_steps_proportion=0.0, lr_scheduler_type="constant"),
    )  # fmt: skip
    rollout = InferenceEngineConfig(
        experiment_name="e", trial_name="t", backend="sglang:d1", consumer_batch_size=3, max_head_offpolicyness=8
    )
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=actor_config, rollout=rollout)
    settings = {"backend": "vllm:d1", "check_trajectory_format": True, "return_routed_experts": True}
    actor_config.enable_tree_training = True
    wrong = GRPOConfig(experiment_name="e", trial_name="t", actor=actor_config, rollout=replace(rollout, **settings))
    try:
        workflow_arguments(wrong, spec_file, folder)
        named = ""
    except TrainError as error:
        named = str(error)
    actor_config.enable_tree_training = False
    arguments = workflow_arguments(config, spec_file, folder)
    assert arguments["ranks"] == 1
    workflow = import_from_string("engine.plugins.trainers.areal.EngineWorkflow")(**arguments)

    class Engine(ScriptedSampler):
        """What RemoteInfEngine.agenerate returns."""

        addresses: list[str] = []
        asked: list[ModelRequest] = []

        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            self.asked.append(req)
            ids, logprobs = self.reply(req.rid, req.input_ids, req.gconfig.max_new_tokens)
            return ModelResponse(
                input_tokens=req.input_ids, output_tokens=ids, output_logprobs=logprobs, output_versions=[5] * len(ids)
            )

        def get_version(self) -> int:
            return 5

    rollouts = workflow.episodes.rollouts
    engine = Engine(rollouts.format)
    try:
        asyncio.run(backend.ArealBackend(engine, rollouts).start())
    except TrainError as error:
        print(json.dumps({"refused": str(error), "named": named}))
        return
    executor = WorkflowExecutor(rollout, engine)
    executor.initialize()
    try:
        batch = executor.rollout_batch([{"task": task} for task in tasks.split(",")], workflow)
    finally:
        asyncio.run_coroutine_threadsafe(workflow.episodes.close(), workflow.episodes._loop).result()
        executor.destroy()
    vision = rollouts.format.vision
    asked = [
        (request.input_ids.count(vision.placeholder_id), len(request.image_data), request.gconfig.max_tokens - len(request.input_ids))
        for request in engine.asked
    ]  # fmt: skip
    pngs = {text for request in engine.asked for text in request.image_data}
    scaled = {base64.b64encode(base64.b64decode(text, validate=True)).decode() == text for text in pngs}

    rows = sum(len(each["input_ids"]) for each in batch)
    actor_config.mb_spec = MicroBatchSpec(n_mbs=rows)  # packing needs flash-attention, so each row is a pass
    actor = FSDPPPOActor(actor_config)
    actor.create_process_group()
    actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=3, train_batch_size=3))
    passes: list[dict[str, Any]] = []
    prepare = actor._prepare_mb_list

    def seen(input_: dict[str, Any]) -> Any:
        made = prepare(input_)
        passes.extend(made.padded_mbs)
        return made

    actor._prepare_mb_list = seen
    watch(actor)
    logprobs = actor.compute_logp(batch)
    told = []
    for each, found in zip(batch, logprobs, strict=True):
        each["prox_logp"] = found
        for place, ids in enumerate(each["input_ids"]):
            there = each["loss_mask"][place].bool()
            length = int(each["attention_mask"][place].sum())
            told.append({"ids": ids[:length].tolist(), "logprobs": found[place][torch.roll(there, -1)].tolist()})
    by_ids = {tuple(each["ids"]): each for each in told}
    for inputs in passes:
        length = int(inputs["cu_seqlens"][1])
        row = by_ids[tuple(inputs["input_ids"][0, :length].tolist())]
        row["checksums"] = checksums_of(inputs) if "pixel_values" in inputs else []
        row["positions"] = inputs["position_ids"][:, 0, :length].tolist()

    said = []
    for change in (swapped, moved, lost) if pngs else ():
        spoilt = [dict(each) | {"multi_modal_input": list(each["multi_modal_input"])} for each in batch]
        change(spoilt, rollouts.pixels)
        try:
            actor.compute_advantages(spoilt)
            said.append("")
        except TrainError as error:
            said.append(str(error))
    computed = actor.compute_advantages([dict(each) for each in batch])
    lists = [[len(each["multi_modal_input"]), len(each["input_ids"])] for each in computed]
    before = {name: value.detach().clone() for name, value in actor.model.named_parameters()}
    actor.ppo_update(computed)
    moved_names = [
        name for name, value in actor.model.named_parameters() if not torch.equal(_whole(before[name]), _whole(value))
    ]
    actor.destroy()
    print(json.dumps({"rows": told, "asked": asked, "scaled": scaled == {True} if pngs else None, "pngs": len(pngs), "said": said, "lists": lists,
                      "visual": sum("visual" in name for name in moved_names), "changed": len(moved_names)}))  # fmt: skip


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _first(batch: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """The list of images of a group whose rows have other images, and the place of its first row."""
    lists = [each["multi_modal_input"] for each in batch]
    return next(images for images in lists if images[0].images.digests != images[1].images.digests), 0


def _again(images: Any, digests: tuple[str, ...], pixels: Any) -> Any:
    """The images of a row with others in their place, whose number of patches is the same or not."""
    from engine.plugins.trainers.areal.rows import ImageDict
    from engine.plugins.trainers.pixels import RowImages, checksum

    bank = pixels.vision.bank
    sums = tuple(checksum(bank.tensors(digest)) for digest in digests)
    return ImageDict(RowImages(pixels.vision.family, digests, sums, {each: bank.prepared(each) for each in digests}))


def swapped(batch: list[dict[str, Any]], pixels: Any) -> None:
    images, place = _first(batch)
    digests = images[place].images.digests
    images[place] = _again(images[place], (digests[1], digests[0], *digests[2:]), pixels)


def moved(batch: list[dict[str, Any]], pixels: Any) -> None:
    """Two rows of a group change their images."""
    images, place = _first(batch)
    images[place], images[1 - place] = images[1 - place], images[place]


def lost(batch: list[dict[str, Any]], pixels: Any) -> None:
    images, place = _first(batch)
    del images[place]


if __name__ == "__main__":
    main(*sys.argv[1:])
