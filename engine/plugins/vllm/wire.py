"""The bodies of requests to /v1/completions, and of their replies.

vLLM fills in each parameter that a request leaves out with the value of the model's `generation_config.json`, so every
parameter is sent.

Invariant: a reply is accepted only if the prompt that the server echoed is the one that was sent, each sampled id has exactly
one log-prob of the same id, and all ids lie in the vocabulary.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from engine.backends.servers.wire import (
    EncodedRequest,
    PromptEncoder,
    PromptMismatch,
    ReplyError,
    ReplyPart,
    arrays,
    ending,
)
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams

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


LOWEST = -9999.0
"""vLLM's log-prob of a probability of 0: JSON has no infinity."""
_TOKEN = "token_id:"
_NONE = (b"", b"null")


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _LogProbs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_decoder = msgspec.json.Decoder(_Reply)
_ids_decoder = msgspec.json.Decoder(list[int])


def decode(body: bytes, sent: EncodedRequest, vocab_size: int) -> ReplyPart:
    """Read the reply to a request and check it against the request.

    Raises:
        ReplyError: It is not JSON, lacks something, or contradicts itself or the request.
        PromptMismatch: The server worked on another prompt.
    """
    try:
        reply = _decoder.decode(body)
        choice = reply.choices[0]
        echo = bytes(choice.prompt_token_ids)
        same = echo == b"[%b]" % sent.prompt
        seen = None if same or echo in _NONE else _ids_decoder.decode(echo)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise ReplyError(f"it is not what vLLM answers: {error}") from None
    if seen is not None and seen != sent.ids.tolist():
        raise PromptMismatch(sent.ids, seen)
    if choice.logprobs is None:
        raise ReplyError("it holds no log-probs")
    named, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    ids = choice.token_ids if choice.token_ids is not None else _named_ids(named)
    if named != list(map(_TOKEN.__add__, map(str, ids))) or len(values) != len(ids):
        raise ReplyError(f"its {len(values)} log-probs are not those of its {len(ids)} tokens")
    usage = reply.usage
    if usage.prompt_tokens not in (None, len(sent.ids)):
        raise ReplyError(f"it counts {usage.prompt_tokens} prompt tokens where {len(sent.ids)} were sent")
    if usage.completion_tokens not in (None, len(ids)):
        raise ReplyError(f"it counts {usage.completion_tokens} tokens and holds {len(ids)}")
    if len(ids) > sent.max_new_tokens:
        raise ReplyError(f"it holds {len(ids)} tokens where at most {sent.max_new_tokens} were asked for")
    array, logprobs = arrays(ids, values, vocab_size)
    if len(values) and logprobs.min() <= LOWEST:
        raise ReplyError(f"token {int(logprobs.argmin())} has probability 0")
    cached = usage.prompt_tokens_details
    return ReplyPart(
        ids=array,
        logprobs=logprobs,
        finish=_finish(choice, ids),
        versions=[],
        version=None,
        prompt_tokens=len(sent.ids),
        cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
        queue_seconds=0.0,
        echoed=same or seen is not None,
    )


def _named_ids(tokens: list[str]) -> list[int]:
    """The ids of `token_id:17`, for a server that has no `return_token_ids`."""
    try:
        return [int(token.removeprefix(prefix)) for token, prefix in zip(tokens, repeat(_TOKEN))]
    except ValueError:
        raise ReplyError("it names no token ids") from None


def _finish(choice: _Choice, ids: list[int]) -> FinishReason:
    reason = choice.finish_reason
    if reason == "length":
        return ending("length", None, None)
    if reason == "stop":
        matched = choice.stop_reason
        if matched is None and ids:  # the end-of-text token of the model's own configuration
            matched = ids[-1]
        return ending("stop", matched, None)
    if reason == "abort":
        return ending("abort", None, "aborted")
    raise ReplyError(f"it ended for an unknown reason, {reason!r}")
