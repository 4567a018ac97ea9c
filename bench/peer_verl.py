"""verl as a subject of rollout.py: its `AgentLoopWorker` with `ToolAgentLoop`, and its client and load balancer on Ray.

verl sends requests to servers by Ray and not by HTTP: an actor holds the server. Here that actor passes each request on to the fake, in a
process that is not measured; what is measured is the worker's process, with Ray's part in it. A batch has as many episodes as run at once. Its
padded tensors are part of what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

import aiohttp
import numpy as np
import ray
import verl
from hydra import compose, initialize_config_dir
from peers import answer, check_row, messages
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return answer(expression)


class Server:
    """Does what verl's SGLang server does with a request, with the fake in place of SGLang."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session: aiohttp.ClientSession | None = None

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """The fake's reply."""
        self.session = self.session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = {
            "rid": request_id,
            "input_ids": prompt_ids,
            "return_logprob": sampling_params["logprobs"],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 512},
        }
        data = json.dumps(body, separators=(",", ":"))
        async with self.session.post(f"{self.url}/generate", data=data) as response:
            reply = await response.json(content_type=None)
        scored = reply["meta_info"]["output_token_logprobs"]
        return TokenOutput(
            token_ids=[token for _, token, _ in scored],
            log_probs=[value for value, _, _ in scored],
            stop_reason="completed",
            extra_fields={"global_steps": 0},
        )


function_tool(calculate)
if not ray.is_initialized():  # Ray imports this module in the actor too
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
folder = Path(tempfile.mkdtemp(prefix="bench-verl-"))


def model_folder(model: str) -> Path:
    """The tokenizer's folder with the configuration that verl reads beside it."""
    copy = folder / "model"
    if not copy.exists():
        shutil.copytree(model, copy)
        settings = {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "transformers_version": version("transformers"),
        }
        (copy / "config.json").write_text(json.dumps(settings))
    return copy


class Verl:
    def __init__(self, workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> None:
        self.workload, self.turns, self.outputs = workload, turns, []  # type: ignore[var-annotated]
        model = model_folder(workload.model)
        length = turns * (len(workload.reply) + 40)
        with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            config = compose(
                "ppo_trainer",
                [
                    f"actor_rollout_ref.model.path={model}",
                    "actor_rollout_ref.rollout.name=sglang",
                    "actor_rollout_ref.rollout.prompt_length=512",
                    f"actor_rollout_ref.rollout.response_length={length}",
                    "actor_rollout_ref.rollout.calculate_log_probs=true",
                    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
                    f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={turns}",
                    "actor_rollout_ref.rollout.multi_turn.format=hermes",
                ],
            )
        server = ray.remote(Server).options(max_concurrency=1000, num_cpus=0).remote(url)
        balancer = get_router_handle({"fake": server})
        self.worker = AgentLoopWorker(config, LLMServerClient(config, balancer))
        self.worker.tools = list(FUNCTION_TOOL_REGISTRY.values())
        self.batches = []
        for start in range(0, episodes, concurrency):
            count = min(concurrency, episodes - start)
            prompts = np.empty(count, dtype=object)
            prompts[:] = [messages(schema=True) for _ in range(count)]
            numbers = np.arange(start, start + count)
            columns = {"raw_prompt": prompts, "index": numbers, "uid": numbers.astype(str).astype(object)}
            self.batches.append(DataProto(non_tensor_batch=columns, meta_info={"global_steps": 1}))

    async def run(self) -> None:
        for batch in self.batches:
            self.outputs.append(await self.worker.generate_sequences(batch))

    def check(self) -> None:
        rows = 0
        for output in self.outputs:
            columns = [output.batch[name].tolist() for name in ("responses", "response_mask", "rollout_log_probs")]
            for row in zip(*columns, strict=True):
                check_row(*row, self.workload, self.turns)
                rows += 1
        assert rows == sum(len(batch) for batch in self.batches), rows


def close() -> None:
    """End Ray's processes."""
    ray.shutdown()
    shutil.rmtree(folder)


episodes = Verl
