"""slime as a subject of rollout.py: its `generate_rollout_async` with the multi-turn function of its example `retool`.

slime is not on PyPI: SLIME_SOURCE is a checkout of https://github.com/THUDM/slime (624b824a8), whose requirements, without SGLang and
Megatron, are what its Python needs. The example runs Python code as its tool; here its `execute_predictions` finds the workload's call, with
the example's own pattern, and calls the workload's tool. All else is slime's: prompts by ids, HTTP client, samples with log-probs.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any
from urllib.parse import urlsplit

# ruff: noqa: E402  (slime and its example are no packages)
source = os.environ.get("SLIME_SOURCE", "slime")
sys.path[:0] = [source, f"{source}/examples/retool"]

import generate_with_retool as retool
from peers import CALL, answer, check_row, messages
from slime.rollout.sglang_rollout import GenerateState, generate_rollout_async
from slime.utils import http_utils
from slime.utils.types import Sample

SAMPLES = 8


async def execute_predictions(prediction: str) -> tuple[str, bool]:
    """One tool call."""
    match = CALL.search(prediction)
    assert match is not None
    call = json.loads(match.group(1))
    said = answer(call["arguments"]["expression"])
    return f"\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n<|im_start|>assistant\n", False


async def no_reward(args: Namespace, sample: Sample, **_: Any) -> float:
    return 0.0


retool.execute_predictions = execute_predictions


def arguments(workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> Namespace:
    """What slime's command line would give."""
    address = urlsplit(url)
    return Namespace(
        ci_test=False,
        custom_generate_function_path="generate_with_retool.generate",
        custom_rm_path="peer_slime.no_reward",
        dynamic_sampling_filter_path=None,
        group_rm=False,
        hf_checkpoint=workload.model,
        mask_offpolicy_in_partial_rollout=False,
        n_samples_per_prompt=SAMPLES,
        over_sampling_batch_size=episodes // SAMPLES,
        partial_rollout=False,
        rm_type=None,
        rollout_all_samples_process_path=None,
        rollout_batch_size=episodes // SAMPLES,
        rollout_global_dataset=True,
        rollout_max_context_len=1_000_000,
        rollout_max_response_len=512,
        rollout_num_engines=1,
        rollout_sample_filter_path=None,
        rollout_seed=0,
        rollout_skip_special_tokens=False,
        rollout_stop=None,
        rollout_stop_token_ids=[workload.reply[-1]],
        rollout_temperature=1.0,
        rollout_top_k=-1,
        rollout_top_p=1.0,
        sglang_dp_size=1,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        sglang_server_concurrency=concurrency,
        use_distributed_post=False,
        use_rollout_routing_replay=False,
    )


class Slime:
    def __init__(self, workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> None:
        assert episodes % SAMPLES == 0
        self.workload, self.turns, self.episodes = workload, turns, episodes
        self.arguments = arguments(workload, url, turns, episodes, concurrency)
        retool.TOOL_CONFIGS |= {"max_turns": turns, "max_tool_calls": turns}
        http_utils.init_http_client(self.arguments)
        GenerateState(self.arguments)
        prompt = messages(schema=True)[1]["content"]
        self.groups = [
            [Sample(group_index=group, index=group * SAMPLES + number, prompt=prompt) for number in range(SAMPLES)]
            for group in range(episodes // SAMPLES)
        ]

    async def run(self) -> None:
        self.output, _ = await generate_rollout_async(self.arguments, 0, lambda count: self.groups[:count])

    def check(self) -> None:
        samples = [sample for group in self.output.samples for sample in group]
        assert len(samples) == self.episodes, len(samples)
        for sample in samples:
            ids = sample.tokens[-sample.response_length :]
            check_row(ids, sample.loss_mask, sample.rollout_log_probs, self.workload, self.turns)


episodes = Slime
