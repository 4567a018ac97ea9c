"""Rows of slime: its own `generate`, and the `generate` of two of its examples, over a scripted server. Run with a Python that has torch and transformers.

SLIME_SOURCE=CHECKOUT python scripts/audit_frameworks/slime_rows.py TOKENIZERS OUT qwen2_5 …
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

SOURCE = Path(os.environ["SLIME_SOURCE"])
sys.path.insert(0, str(SOURCE))


class _Anything(types.ModuleType):
    """A module that is imported beside the rollout code and not called by it (a server's, a trainer's)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in (
    "sglang_router", "sglang", "sglang.srt", "sglang.srt.utils", "ray", "ray.actor", "megatron", "pylatexenc", "pylatexenc.latex2text",
    "slime.backends.sglang_utils.server_control",
):  # fmt: skip
    try:
        __import__(_name)
    except ImportError:
        sys.modules[_name] = _Anything(_name)

from scripted import SAMPLES, TASKS, Sampler, cli, load, model_folder, prompt_of, right, write_about  # noqa: E402
from slime.observability.rollout_data_utils import save_debug_rollout_data  # noqa: E402
from slime.rollout import sglang_rollout  # noqa: E402
from slime.utils.types import Sample  # noqa: E402


def server(sampler: Sampler, place: dict[str, int]) -> Any:
    """Stands where the SGLang router would: `post(url, payload)` answers as `/generate` does."""

    async def post(url: str, payload: dict[str, Any], **_: Any) -> dict[str, Any]:
        prompt = payload["input_ids"] if "input_ids" in payload else sampler.encode(payload["text"])
        ids, logprobs, finish, versions = sampler.reply(prompt, place["task"], place["sample"], place["turn"])
        place["turn"] += 1
        meta = {
            "output_token_logprobs": [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)],
            "finish_reason": {"type": finish},
            "weight_version": str(versions[0]),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        return {"text": sampler.tokenizer.decode(ids, skip_special_tokens=True), "meta_info": meta}

    return post


def arguments(folder: Path) -> Namespace:
    """The arguments of slime that the rollout reads."""
    return Namespace(
        hf_checkpoint=str(folder), sglang_router_ip="127.0.0.1", sglang_router_port=1, ci_test=False, partial_rollout=False,
        use_rollout_routing_replay=False, rollout_max_context_len=4096, context_parallel_size=1, max_tokens_per_gpu=4096,
        sglang_server_concurrency=8, rollout_num_gpus=1, rollout_num_gpus_per_engine=1, rollout_temperature=1.0, rollout_top_p=1.0,
        rollout_top_k=-1, rollout_max_response_len=256, rollout_stop=None, rollout_stop_token_ids=None, rollout_skip_special_tokens=False,
        sglang_dp_size=1, sglang_enable_deterministic_inference=False, rollout_seed=0, n_samples_per_prompt=SAMPLES, sglang_speculative_algorithm=None,
        router_policy=None, multimodal_keys=None, apply_chat_template=True, use_opd=False, sglang_enable_ep_moe=False, use_rollout_top_p_replay=False,
        chat_template_path=None, mask_offpolicy_in_partial_rollout=False, rollout_top_p_replay=False, custom_generate_function_path=None,
    )  # fmt: skip


ASKS = {
    "search": ["<search>{expression}</search>"],
    "retool": [
        '<tool_call>\n{{"name": "code_interpreter", "arguments": {{"code": "print({expression})"}}}}\n</tool_call>'
    ],
}

FINALS = {"search": "<answer>{answer}</answer>", "retool": "So it is. Answer: \\boxed{{{answer}}}"}


def generator(setting: str) -> tuple[Any, Any]:
    """(the module whose `post` is replaced, its `generate`)"""
    if setting == "single":
        return sglang_rollout, sglang_rollout.generate
    folder = {"search": "search-r1", "retool": "retool"}[setting]
    sys.path.insert(0, str(SOURCE / "examples" / folder))
    if setting == "search":
        import generate_with_search as module

        async def search(query: str) -> str:
            return f'Doc 1(Title: "Sums") {query} is a sum.\n'

        module.search = search
    else:
        import generate_with_retool as module
    return module, module.generate


async def rows(setting: str, template: str, folder: Path, sampler: Sampler) -> list[Sample]:
    module, generate = generator(setting)
    args = arguments(folder)
    found = []
    for task in range(len(TASKS)):
        for sample in range(SAMPLES):
            module.post = server(sampler, {"task": task, "sample": sample, "turn": 0})
            prompt: Any = sampler.tokenizer.apply_chat_template(
                prompt_of(task), tokenize=False, add_generation_prompt=True
            )
            if setting == "retool":
                prompt = prompt_of(task)
            made = Sample(group_index=task, index=task * SAMPLES + sample, prompt=prompt, label=TASKS[task][1])
            made = await generate(args, made, {"max_new_tokens": 256, "temperature": 1.0})
            made.reward = right(task, made.response)
            found.append(made)
    return found


def main() -> None:
    tokenizers, out, templates = cli()
    commit = subprocess.run(
        ["git", "-C", SOURCE, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    titles = {"single": "`sglang_rollout.generate`", "search": "`examples/search-r1`", "retool": "`examples/retool`"}
    for template in templates:
        folder = model_folder(template, tokenizers, out)
        tokenizer = load(folder)
        place = out / "slime" / template
        place.mkdir(parents=True, exist_ok=True)
        settings, failed = {}, {}
        for setting, title in titles.items():
            if setting == "retool" and not template.startswith("qwen"):
                continue  # the example writes ChatML itself
            sampler = Sampler(
                tokenizer,
                template,
                ASKS.get(setting),
                ends=("</search>", "</answer>"),
                final=FINALS.get(setting, "the answer is {answer}."),
            )
            sglang_rollout.SingletonMeta._instances.clear()
            try:
                made = asyncio.run(rows(setting, template, folder, sampler))
                save_debug_rollout_data(str(place / f"{setting}.pt"), made, rollout_id=0, evaluation=False)
                sampler.write(place / f"{setting}.sampled.jsonl")
                settings[setting] = f"{title}|{setting}.pt"
            except Exception as error:  # noqa: BLE001 - what a framework refuses is part of the result
                import traceback

                traceback.print_exc()
                failed[setting] = f"{title}|{type(error).__name__}: {error}"
        write_about(out, "slime", template, settings, {"slime": commit or "unknown"}, failed)


if __name__ == "__main__":
    main()
