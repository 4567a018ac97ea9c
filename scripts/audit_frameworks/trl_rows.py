"""Rows of TRL: what its own `GRPOTrainer` prepares for the loss, with and without tools, over a scripted sampler. Run with a Python that has trl.

python scripts/audit_frameworks/trl_rows.py TOKENIZERS OUT qwen2_5 …
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from scripted import SAMPLES, TASKS, Sampler, cli, load, model_folder, prompt_of, right, write_about
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def calculate(expression: str) -> str:
    """Calculate an expression.

    Args:
        expression: The expression.
    """
    return {"17 + 25": "42", "8 * 7": "56"}[expression]


def reward(prompts: list[Any], completions: list[Any], task: list[int], **_: Any) -> list[float]:
    """The reward function that the trainer calls."""
    return [
        right(each, completion[-1].get("content") or "") for each, completion in zip(task, completions, strict=True)
    ]


class Scripted(GRPOTrainer):
    """TRL's trainer; only the model's own sampling is replaced."""

    sampler: Sampler

    def _generate_single_turn(
        self, prompt_ids: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        ids, logprobs = [], []
        for prompt in prompt_ids:
            text = self.sampler.tokenizer.decode(prompt)
            task = next(at for at, (expression, _) in enumerate(TASKS) if f"What is {expression}" in text)
            turn = int(calculate(TASKS[task][0]) in text)
            sample = self.counts.get((task, turn), 0)
            self.counts[task, turn] = sample + 1
            reply = self.sampler.reply(list(prompt), task, sample, turn)
            ids.append(reply[0])
            logprobs.append(reply[1])
        return ids, logprobs


def rows(folder: Path, template: str, out: Path, *, tools: bool) -> tuple[dict[str, Any], Sampler]:
    """One batch of the trainer."""
    tokenizer = load(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    data = [{"prompt": prompt_of(task), "task": task} for task in range(len(TASKS))]
    trainer = Scripted(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out / "trainer"),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            num_generations=SAMPLES,
            max_completion_length=128,
            per_device_train_batch_size=SAMPLES * len(TASKS),
            report_to=[],
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        tools=[calculate] if tools else None,
    )
    trainer.sampler = Sampler(trainer.processing_class, template, [CALL] if tools else [])
    trainer.counts = {}
    made = trainer._generate_and_score_completions([row for row in data for _ in range(SAMPLES)])
    return {**made, "num_generations": SAMPLES}, trainer.sampler


def main() -> None:
    tokenizers, out, templates = cli()
    for template in templates:
        folder = model_folder(template, tokenizers, out)
        place = out / "trl" / template
        place.mkdir(parents=True, exist_ok=True)
        settings, failed = {}, {}
        for setting, title in (("single", "`GRPOTrainer`"), ("tools", "`GRPOTrainer(tools=…)`")):
            try:
                made, sampler = rows(folder, template, place, tools=setting == "tools")
                torch.save(made, place / f"{setting}.pt")
                sampler.write(place / f"{setting}.sampled.jsonl")
                settings[setting] = f"{title}|{setting}.pt"
            except Exception as error:  # noqa: BLE001 - what a framework refuses is part of the result
                import traceback

                traceback.print_exc()
                failed[setting] = f"{title}|{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        write_about(
            out, "trl", template, settings, {"trl": version("trl"), "transformers": version("transformers")}, failed
        )


if __name__ == "__main__":
    main()
