"""SkyRL as a subject of rollout.py: its `SkyRLGymGenerator` and HTTP client, against the fake's vLLM endpoint.

The environment is one of SkyRL-Gym with a tool group, as its `SearchEnv` is. Prompts grow by ids (`use_conversation_multi_turn`). A batch
has as many episodes as run at once. Its rows and the metrics of its batches are part of what is measured.
"""

# ruff: noqa: E402  (the module is changed before SkyRL reads it)
from __future__ import annotations

import json
import typing
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc, assignment]  # SkyRL is written for Python 3.12

import skyrl_gym
from peers import CALL, answer, check_row, messages
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool
from transformers import AutoTokenizer


class Calculator(ToolGroup):
    def __init__(self) -> None:
        super().__init__(name="Calculator")

    @tool
    def calculate(self, expression: str) -> str:
        return answer(expression)


class Shops(BaseTextEnv):
    """One tool call a turn."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]
        self.init_tool_groups([Calculator()])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        match = CALL.search(action)
        assert match is not None
        call = json.loads(match.group(1))
        output = self._execute_tool("Calculator", call["name"], [call["arguments"]["expression"]])
        said = {"role": "user", "content": f"<tool_response>\n{output}\n</tool_response>"}
        return BaseTextEnvStepOutput(observations=[said], reward=0.0, done=self.turns >= self.max_turns, metadata={})


skyrl_gym.register(id="shops", entry_point="peer_skyrl:Shops")


class Skyrl:
    def __init__(self, workload: Any, url: str, turns: int, episodes: int, concurrency: int) -> None:
        self.workload, self.turns, self.outputs = workload, turns, []  # type: ignore[var-annotated]
        tokenizer = AutoTokenizer.from_pretrained(workload.model)
        self.client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, tokenizer=tokenizer)
        config = GeneratorConfig(max_turns=turns, max_input_length=1_000_000)
        self.generator = SkyRLGymGenerator(config, SkyRLGymConfig(), self.client, tokenizer)
        sampling = {"temperature": 1.0, "max_tokens": 512, "logprobs": 1, "stop_token_ids": [workload.reply[-1]]}
        self.batches = [
            {
                "prompts": [messages(schema=False) for _ in range(count)],
                "env_classes": ["shops"] * count,
                "env_extras": [{} for _ in range(count)],
                "sampling_params": sampling,
            }
            for count in [concurrency] * (episodes // concurrency)
            + [episodes % concurrency] * (episodes % concurrency > 0)
        ]

    async def run(self) -> None:
        for batch in self.batches:
            self.outputs.append(await self.generator.generate(batch, disable_tqdm=True))
        await self.client._session.close()

    def check(self) -> None:
        rows = 0
        for output in self.outputs:
            for row in zip(output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True):
                check_row(*row, self.workload, self.turns)
                rows += 1
        assert rows == sum(len(batch["prompts"]) for batch in self.batches), rows


episodes = Skyrl
