"""Samples with AReaL's inference engine: a backend over `InferenceEngine.agenerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.integrations.trainers.sampler import Sampled, TrainerBackend, given

if TYPE_CHECKING:
    from engine.schemas.backend_base import BackendBase
    from engine.schemas.generation import GenerateRequest

_BOTH = ("temperature", "top_p", "top_k", "ignore_eos", "skip_special_tokens")
_SGLANG = (*_BOTH, "stop", "frequency_penalty")


def names_of(server: str) -> dict[str, str]:
    """The parameters of `sampling` that AReaL sends to its servers, and their names there.

    Args:
        server: `sglang`, `vllm`, or another word, for which only those are named that both take.
    """
    return {name: name for name in (_SGLANG if server == "sglang" else _BOTH)}


class ArealBackend(TrainerBackend):
    """AReaL's inference engine as a backend. It tells the weight version of each token, also if an update interrupts a reply.

    Args:
        engine: AReaL's `InferenceEngine`.
        declared: The config class of the spec's backend, for its capabilities.
        context: Maximum length of a sequence in tokens.
    """

    def __init__(self, engine: Any, declared: type[BackendBase], *, context: int | None) -> None:
        super().__init__("AReaL", declared, context=context)
        self._engine = engine

    async def sample(self, request: GenerateRequest) -> Sampled:
        """See `TrainerBackend.sample`. Requests of one episode have one `rid`, so AReaL sends them to one server."""
        from areal.api import ModelRequest
        from areal.api.cli_args import GenerationHyperparameters

        ids = request.input_ids.tolist()
        settings = given(request.sampling, names_of("sglang")) | {
            "n_samples": 1,
            "max_new_tokens": request.max_new_tokens,
            "max_tokens": len(ids) + request.max_new_tokens,
            "stop_token_ids": sorted(set(request.stop_token_ids)),
            "greedy": request.sampling.temperature == 0,
        }
        if settings.get("top_k") == -1:
            del settings["top_k"]  # AReaL's default is the whole vocabulary
        gconfig = GenerationHyperparameters(**settings)
        found = await self._engine.agenerate(ModelRequest(rid=request.episode_id, input_ids=ids, gconfig=gconfig))
        return Sampled(found.output_tokens, found.output_logprobs, found.output_versions, found.stop_reason == "length")
