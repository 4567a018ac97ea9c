"""verifiers as a subject of rollout.py: its ToolEnv and chat client, against the same fake's /v1/chat/completions.

The workload is the same: the prompt, one call of `calculate` a turn, its observation. It gets no token ids that way, so it
does less than the others. Building its dataset is not part of what is measured.
"""

from __future__ import annotations

import os
from typing import Any

import verifiers as vf
from datasets import Dataset
from peers import answer

os.environ.setdefault("BENCH_KEY", "none")


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return answer(expression)


class Verifiers:
    def __init__(self, workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> None:
        self.turns, self.concurrency, self.outputs = turns, concurrency, []  # type: ignore[var-annotated]
        prompt = [{"role": "user", "content": workload.question}]
        rows = Dataset.from_list([{"prompt": prompt, "answer": ""}] * episodes)
        self.environment = vf.ToolEnv(tools=[calculate], max_turns=turns, dataset=rows, rubric=vf.Rubric())
        self.client = vf.ClientConfig(api_base_url=f"{url}/v1", api_key_var="BENCH_KEY")
        self.inputs = self.environment.get_dataset()

    async def run(self) -> None:
        result = await self.environment.generate(
            self.inputs,
            client=self.client,
            model="fake",
            max_concurrent=self.concurrency,
            on_start=lambda *_: None,  # or it draws a bar
            on_progress=lambda *_: None,
        )
        self.outputs = result["outputs"]

    def check(self) -> None:
        assert len(self.outputs) == len(self.inputs), len(self.outputs)
        for output in self.outputs:
            said = sum(message["role"] == "assistant" for message in output["completion"])
            assert said == self.turns, (said, self.turns)


episodes = Verifiers
