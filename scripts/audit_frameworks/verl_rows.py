"""Rows of verl: its own `AgentLoopWorker` with `single_turn_agent` and `tool_agent` over a scripted client. Run with a Python that has verl.

python scripts/audit_frameworks/verl_rows.py TOKENIZERS OUT qwen2_5 …
"""

from __future__ import annotations

import asyncio
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import verl
from hydra import compose, initialize_config_dir
from scripted import SAMPLES, TASKS, Sampler, cli, model_folder, prompt_of, write_about
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.rollout.replica import TokenOutput

CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def _scored(output: AgentLoopOutput, loop: Any, label: str) -> AgentLoopOutput:
    text = loop.tokenizer.decode(output.response_ids, skip_special_tokens=True)
    output.reward_score = float(label in text[-40:])
    return output


@register("scored_single")
class ScoredSingle(SingleTurnAgentLoop):
    """verl's loop of one turn, with a score; the hand-over of `reward_score` is verl's."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return _scored(await super().run(sampling_params, **kwargs), self, kwargs["reward_model"]["ground_truth"])


@register("scored_tools")
class ScoredTools(ToolAgentLoop):
    """verl's loop with tools, with a score."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return _scored(await super().run(sampling_params, **kwargs), self, kwargs["reward_model"]["ground_truth"])


class Client:
    """Stands where verl's `LLMServerClient` would."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.requests: dict[str, tuple[int, int]] = {}
        self.turns: Counter[str] = Counter()
        self.began: Counter[int] = Counter()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        if request_id not in self.requests:
            text = self.sampler.tokenizer.decode(prompt_ids)
            task = next(at for at, (expression, _) in enumerate(TASKS) if f"What is {expression}" in text)
            self.requests[request_id] = (task, self.began[task])
            self.began[task] += 1
        task, sample = self.requests[request_id]
        ids, logprobs, finish, versions = self.sampler.reply(list(prompt_ids), task, sample, self.turns[request_id])
        self.turns[request_id] += 1
        steps = {"global_steps": versions[0], "min_global_steps": versions[0], "max_global_steps": versions[-1]}
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason={"stop": "completed"}.get(finish, finish), extra_fields=steps
        )


def config(folder: Path, tools: bool) -> Any:
    """verl's configuration of the rollout."""
    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.prompt_length={512 if tools else 64}",
        f"actor_rollout_ref.rollout.response_length={128 if tools else 64}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
    ]
    if tools:
        overrides.append(
            f"actor_rollout_ref.rollout.multi_turn.function_tool_path={Path(__file__).with_name('verl_tool.py')}"
        )
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides)


def batch(agent: str) -> DataProto:
    """The prompts of all tasks, each as often as it is sampled."""
    places = [task for task in range(len(TASKS)) for _ in range(SAMPLES)]

    def column(values: list[Any]) -> np.ndarray:
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found

    return DataProto(
        non_tensor_batch={
            "raw_prompt": column([prompt_of(task) for task in places]),
            "uid": column([f"task-{task}" for task in places]),
            "index": np.array(places),
            "agent_name": column([agent] * len(places)),
            "reward_model": column([{"style": "rule", "ground_truth": TASKS[task][1]} for task in places]),
        },
        meta_info={"global_steps": 3},
    )


def dump_texts(made: DataProto, worker: AgentLoopWorker, folder: Path) -> None:
    """The JSON lines of `trainer.rollout_data_dir`, by verl's own writer, decoded as its trainer does."""
    decode = worker.tokenizer.decode
    PPOTrainer._write_generations(
        [decode(ids, skip_special_tokens=True) for ids in made.batch["prompts"]],
        [decode(ids, skip_special_tokens=True) for ids in made.batch["responses"]],
        [each["ground_truth"] for each in made.non_tensor_batch["reward_model"]],
        made.batch["rm_scores"].sum(-1).tolist(),
        {"uid": made.non_tensor_batch["uid"].tolist()},
        str(folder),
        3,
    )


def main() -> None:
    tokenizers, out, templates = cli()
    for template in templates:
        folder = model_folder(template, tokenizers, out).resolve()
        place = out / "verl" / template
        place.mkdir(parents=True, exist_ok=True)
        settings, failed = {}, {}
        for setting, title in (("single", "`single_turn_agent`"), ("tools", "`tool_agent`, hermes calls")):
            try:
                worker = AgentLoopWorker(config(folder, setting == "tools"), None, None, None)
                sampler = Sampler(worker.tokenizer, template, [CALL] if setting == "tools" else [])
                worker.llm_client = Client(sampler)
                made = asyncio.run(worker.generate_sequences(batch(f"scored_{setting}")))
                made.non_tensor_batch |= {
                    key: value for key, value in batch("").non_tensor_batch.items() if key not in made.non_tensor_batch
                }
                made.save_to_disk(place / f"{setting}.pkl")
                sampler.write(place / f"{setting}.sampled.jsonl")
                settings[setting] = f"{title}|{setting}.pkl"
                if setting == "single":
                    dump_texts(made, worker, place / "dump")
                    settings["dump"] = "`rollout_data_dir`|dump/3.jsonl"
            except Exception as error:  # noqa: BLE001 - what a framework refuses is part of the result
                import traceback

                traceback.print_exc()
                failed[setting] = f"{title}|{type(error).__name__}: {error}"
        versions = {name: version(name) for name in ("verl", "transformers")}
        write_about(out, "verl", template, settings, versions, failed)


if __name__ == "__main__":
    main()
