"""Samples with SkyRL's inference engines: a backend over its `InferenceEngineInterface`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from engine.integrations.trainers.sampler import Sampled, TrainerBackend, given

if TYPE_CHECKING:
    from engine.schemas.backend_base import BackendBase
    from engine.schemas.generation import GenerateRequest

NAMES = {
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "ignore_eos",
            "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
        )
    },
    "min_new_tokens": "min_tokens",
}  # fmt: skip
"""The parameters of `sampling` that SkyRL's vLLM servers take, and their names there."""


class SkyRLBackend(TrainerBackend):
    """SkyRL's inference engines as a backend. SkyRL tells no weight versions: all tokens have that of `version`.

    Args:
        client: SkyRL's inference engine client.
        declared: The config class of the spec's backend, for its capabilities.
        context: Maximum length of a sequence in tokens.
        model: The name by which SkyRL's servers know the policy; None: the client's own.
    """

    def __init__(self, client: Any, declared: type[BackendBase], *, context: int | None, model: str | None) -> None:
        super().__init__("SkyRL", declared, context=context)
        self._client = client
        self._model = model
        self._released: set[asyncio.Task[None]] = set()
        self.version = 0
        """The version of the weights that the servers have now; the generator sets it."""

    async def sample(self, request: GenerateRequest) -> Sampled:
        """See `TrainerBackend.sample`."""
        params = given(request.sampling, NAMES) | {
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(set(request.stop_token_ids)),
            "include_stop_str_in_output": True,
            "seed": request.seed,
            "logprobs": 1,
        }
        batch = {
            "prompts": None,
            "prompt_token_ids": [request.input_ids.tolist()],
            "sampling_params": params,
            "session_ids": [request.episode_id],
        }
        found = await self._client.generate(batch, model=self._model)
        ids, logprobs = found["response_ids"][0], found["response_logprobs"]
        return Sampled(
            ids,
            None if logprobs is None else logprobs[0],
            [self.version] * len(ids),
            found["stop_reasons"][0] == "length",
        )

    def release(self, episode_id: str) -> None:
        """Tell SkyRL's router that an episode has ended, so that it frees the place of its session."""
        task = asyncio.get_running_loop().create_task(self._client.finish_session(episode_id))
        self._released.add(task)
        task.add_done_callback(self._released.discard)

    async def close(self) -> None:
        """Wait until the router has received the end of every finished episode."""
        await asyncio.gather(*self._released)
