"""verifiers as a subject of rollout.py: its ToolEnv and chat client, against the same fake's /v1/chat/completions.

The workload is the same: the prompt, one call of `calculate` a turn, its observation. It gets no token ids that way, so it
does less than the others. Building its dataset is not part of what is measured.
"""

from __future__ import annotations

import os
import time

from floor import OBSERVATION, Workload

SAID = OBSERVATION.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return SAID.format(expression, 422)


async def run(url: str, workload: Workload, turns: int, episodes: int, concurrency: int) -> tuple[int, float, float]:
    """(turns taken, CPU seconds, wall seconds) of so many rollouts."""
    import verifiers as vf
    from datasets import Dataset

    os.environ.setdefault("BENCH_KEY", "none")
    prompt = [{"role": "user", "content": workload.question}]
    rows = Dataset.from_list([{"prompt": prompt, "answer": ""}] * episodes)
    environment = vf.ToolEnv(tools=[calculate], max_turns=turns, dataset=rows, rubric=vf.Rubric())
    client = vf.ClientConfig(api_base_url=f"{url}/v1", api_key_var="BENCH_KEY")
    inputs = environment.get_dataset()
    began, wall = time.process_time(), time.perf_counter()
    outputs = await environment.generate(
        inputs,
        client=client,
        model="fake",
        max_concurrent=concurrency,
        on_start=lambda *_: None,  # or it draws a bar
        on_progress=lambda *_: None,
    )
    spent, took = time.process_time() - began, time.perf_counter() - wall
    said = sum(message["role"] == "assistant" for output in outputs["outputs"] for message in output["completion"])
    assert said == turns * episodes, (said, turns * episodes)
    return said, spent, took
