"""The bodies of requests to /v1/completions.

vLLM fills in each parameter that a request leaves out with the value of the model's `generation_config.json`, so every
parameter is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from engine.backends.servers.request import EncodedRequest, PromptEncoder
from engine.schemas.generation import GenerateRequest, SamplingParams

BANNED = -100.0
"""Logit bias of a banned id: the lowest one that vLLM takes."""
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""The engine's name of a constraint -> vLLM's, in `structured_outputs`."""


class Encoder(PromptEncoder):
    """Encodes requests to /v1/completions."""

    def encode(
        self,
        request: GenerateRequest,
        rid: str,
        ids: np.ndarray,
        max_new_tokens: int,
        sampled: int = 0,
        *,
        prefixes: str | None = None,
    ) -> EncodedRequest:
        prompt = self._prompt(request.episode_id, ids)
        tail = b'],"request_id":%b,"max_tokens":%d,"seed":%d%b%b,%b}' % (
            msgspec.json.encode(rid),
            max_new_tokens,
            request.seed,
            b"" if prefixes is None else b',"cache_salt":' + msgspec.json.encode(prefixes),
            b"" if request.adapter is None else b',"model":' + msgspec.json.encode(request.adapter),
            self._sampling_text(request, sampled),
        )
        return EncodedRequest((b'{"prompt":[', prompt, tail), rid, prompt, ids, max_new_tokens)

    def dump(self, sampling: SamplingParams, request: GenerateRequest) -> bytes:
        return msgspec.json.encode(sampling_fields(sampling, request.stop_token_ids, request.banned_token_ids))[1:-1]


def sampling_fields(sampling: SamplingParams, stop_ids: list[int], banned_ids: list[int]) -> dict[str, Any]:
    """The fields of a request except prompt, length, seed and model.

    Args:
        sampling: The spec's parameters.
        stop_ids: Ids that end the reply. With `ignore_eos` none is sent: vLLM would still stop at them.
        banned_ids: Ids that must not be sampled.
    """
    given: dict[str, Any] = {
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k is not None and sampling.top_k > 0 else 0,
        "min_p": sampling.min_p or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "repetition_penalty": 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "min_tokens": sampling.min_new_tokens or 0,
        "ignore_eos": bool(sampling.ignore_eos),
        "stop_token_ids": [] if sampling.ignore_eos else list(stop_ids),
        "stop": sampling.stop,
        # Stop strings are looked for in the text, in which the marks of the chat format are special tokens.
        "skip_special_tokens": bool(sampling.skip_special_tokens),
    }
    if sampling.spaces_between_special_tokens is not None:
        given["spaces_between_special_tokens"] = sampling.spaces_between_special_tokens
    bias = {**(sampling.logit_bias or {}), **{str(token): BANNED for token in banned_ids}}
    if bias:
        given["logit_bias"] = bias
    constraints = {
        name: getattr(sampling, key) for key, name in _CONSTRAINTS.items() if getattr(sampling, key) is not None
    }
    if constraints:
        given["structured_outputs"] = constraints
    return given
