"""TRL as a subject of rollout.py: the rollout loop of its asynchronous GRPO trainer, against the fake's vLLM endpoint.

`AsyncRolloutWorker` runs this loop in a child process, which needs no GPU; here it runs in the process that is measured, with queues of
this process. It repeats its data set for ever, and drops groups that are not scored when it is stopped; here generating stops after the
last group, and scoring after the last score. Each turn renders and tokenises the conversation again, as TRL does. Scoring is measured too.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from multiprocessing import Event, Value
from pathlib import Path
from typing import Any

import aiohttp
import trl
from accelerate.state import PartialState
from datasets import Dataset
from peers import answer, check_row, messages
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

SAMPLES = 8
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
"""A template that TRL knows how to parse, from its own folder; it compares texts of whole templates."""

PartialState()


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return answer(expression)


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Loop(_AsyncRolloutLoop):
    """TRL's loop, over a data set that is read once."""

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for group, row in enumerate(self.dataset):
            for number in range(self.num_generations):
                if group == len(self.dataset) - 1 and number == self.num_generations - 1:
                    self._stop_event.set()
                yield group, row


class Trl:
    def __init__(self, workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> None:
        assert episodes % SAMPLES == 0
        self.workload, self.turns, self.episodes, self.concurrency = workload, turns, episodes, concurrency
        self.samples: queue.Queue[Any] = queue.Queue()
        tokenizer = AutoTokenizer.from_pretrained(workload.model)
        tokenizer.chat_template = TEMPLATE.read_text()
        self.loop = Loop(
            model_name="fake",
            dataset=Dataset.from_list([{"prompt": messages(schema=True)}] * (episodes // SAMPLES)),
            reward_funcs=[no_reward],
            processing_class=tokenizer,
            eos_token_ids=[workload.reply[-1]],
            rollout_buffer=self.samples,
            model_version_value=Value("i", 0),
            heartbeat_value=Value("d", 0.0),
            failed_event=Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=queue.Queue(maxsize=4096),
            tools=[calculate],
            num_generations=SAMPLES,
            max_inflight_tasks=concurrency,
            score_queue_maxsize=0,
            vllm_server_url=url,
            max_tokens=512,
            max_tool_calling_iterations=turns - 1,
        )

    async def run(self) -> None:
        loop = self.loop
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.concurrency)) as loop.session:
            await asyncio.gather(
                asyncio.create_task(loop._generate_loop(stop_event=loop._stop_event)),
                asyncio.create_task(loop._score_loop(stop_event=asyncio.Event())),
            )

    def check(self) -> None:
        assert self.samples.qsize() == self.episodes, (self.samples.qsize(), self.episodes)
        while not self.samples.empty():
            row = self.samples.get()
            ids, mask, logprobs = row.input_ids.tolist(), row.completion_mask.tolist(), row.old_log_probs.tolist()
            check_row(ids, mask, logprobs, self.workload, self.turns)


episodes = Trl
