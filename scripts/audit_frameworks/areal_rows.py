"""Rows of AReaL: its own `RLVRWorkflow` and `MultiTurnWorkflow` over a scripted engine. Run with a Python that has areal and torch.

python scripts/audit_frameworks/areal_rows.py TOKENIZERS OUT qwen2_5 …
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import torch
from areal.api import ModelResponse
from areal.api.cli_args import GenerationHyperparameters
from areal.utils.data import concat_padded_tensors
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from scripted import SAMPLES, TASKS, Sampler, cli, load, model_folder, prompt_of, right, write_about


class Engine:
    """Stands where AReaL's inference engine would; gives scripted replies of one episode."""

    def __init__(self, sampler: Sampler, task: int, sample: int) -> None:
        self.sampler, self.task, self.sample, self.turn = sampler, task, sample, 0

    async def agenerate(self, req: Any) -> ModelResponse:
        ids, logprobs, finish, versions = self.sampler.reply(req.input_ids, self.task, self.sample, self.turn)
        self.turn += 1
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=ids,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason=finish,
            tokenizer=req.tokenizer,
        )


def reward(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, task: int = 0, **_: Any) -> float:
    """The reward function that the workflows call."""
    return right(task, completion)


async def rows(workflow: Any, sampler: Sampler) -> dict[str, Any]:
    """All episodes of a workflow, as one batch of padded tensors."""
    found, groups = [], []
    for task in range(len(TASKS)):
        for sample in range(SAMPLES):
            data = {"messages": prompt_of(task), "task": task}
            found.append(await workflow.arun_episode(Engine(sampler, task, sample), data))
            groups.append(str(task))
    return {**concat_padded_tensors(found), "group": groups}


def main() -> None:
    tokenizers, out, templates = cli()
    for template in templates:
        folder = model_folder(template, tokenizers, out)
        tokenizer = load(folder)
        place = out / "areal" / template
        place.mkdir(parents=True, exist_ok=True)
        settings, failed = {}, {}
        config = GenerationHyperparameters(max_new_tokens=64)
        for setting, title in (("single", "`RLVRWorkflow`"), ("turns", "`MultiTurnWorkflow`, two turns")):
            asks = [] if setting == "single" else ["Perhaps the answer of {expression} is 40."]
            sampler = Sampler(tokenizer, template, asks)
            try:
                if setting == "single":
                    workflow: Any = RLVRWorkflow(reward, config, tokenizer)
                else:
                    workflow = MultiTurnWorkflow(reward, config, tokenizer, max_turns=2, turn_discount=0.9)
                torch.save(asyncio.run(rows(workflow, sampler)), place / f"{setting}.pt")
                sampler.write(place / f"{setting}.sampled.jsonl")
                settings[setting] = f"{title}|{setting}.pt"
                if setting == "single":  # the workflow's default, which templates without this variable ignore
                    settings[setting] += '|{"enable_thinking": false}'
            except Exception as error:  # noqa: BLE001 - what a framework refuses is part of the result
                failed[setting] = f"{title}|{type(error).__name__}: {error}"
        write_about(
            out,
            "areal",
            template,
            settings,
            {"areal": version("areal"), "transformers": version("transformers")},
            failed,
        )


if __name__ == "__main__":
    main()
