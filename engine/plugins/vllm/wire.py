"""vLLM's dialect: its names, and where things stand in the reply of /v1/completions.

vLLM fills in each parameter that a request leaves out with the value of the model's `generation_config.json`, so every
parameter is sent.
"""

from __future__ import annotations

import re

import msgspec

from engine.plugins.servers.dialect import Dialect, ReplyFields
from engine.plugins.servers.wire import EncodedRequest

_TOKEN = "token_id:"


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str]


class _Choice(msgspec.Struct):
    logprobs: _LogProbs
    finish_reason: str | None = None
    stop_reason: int | str | None = None
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


def reply_fields(body: bytes | bytearray, sent: EncodedRequest) -> ReplyFields:
    """See `Dialect.fields`. A server before 0.10.2 has ids only in the names of the log-probs."""
    reply = _decoder.decode(body)
    choice, usage = reply.choices[0], reply.usage
    echo, names, ids = bytes(choice.prompt_token_ids), choice.logprobs.tokens, choice.token_ids
    same = echo[:1] == b"[" and sent.is_prompt(echo, 1, len(echo) - 1) and echo[-1:] == b"]"
    if ids is None:
        ids = [int(name.removeprefix(_TOKEN)) for name in names]
    matched = choice.stop_reason
    if matched is None and ids:  # the end-of-text token of the model's own configuration
        matched = ids[-1]
    cached = usage.prompt_tokens_details
    return ReplyFields(
        ids=ids,
        logprobs=choice.logprobs.token_logprobs,
        logprob_ids=ids if names == [f"{_TOKEN}{token}" for token in ids] else None,
        finish=str(choice.finish_reason),
        matched=matched if choice.finish_reason == "stop" else None,
        message="aborted" if choice.finish_reason == "abort" else None,
        echoed=same or echo not in (b"", b"null"),
        echo=None if same or echo in (b"", b"null") else _ids_decoder.decode(echo),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
    )


VLLM = Dialect(
    servers="vLLM",
    path="/v1/completions",
    probe="/v1/models",
    start="`vllm serve {folder}`",
    prompt="prompt",
    rid="request_id",
    length="max_tokens",
    seed="seed",
    prefixes="cache_salt",
    adapter="model",
    echo="return_token_ids",
    echo_since="vllm 0.10.2",
    always={"logprobs": 0, "return_tokens_as_token_ids": True},  # log-probs of the sampled token alone
    names={
        "min_new_tokens": "min_tokens",
        "json_schema": "structured_outputs.json",
        "regex": "structured_outputs.regex",
        "ebnf": "structured_outputs.grammar",
        "structural_tag": "structured_outputs.structural_tag",
        "no_stop_trim": None,
    },
    defaults={
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "stop": [],
        # Stop strings are looked for in the text, in which the marks of the chat format are special tokens.
        "skip_special_tokens": False,
    },
    ban=-100.0,  # the lowest one that vLLM takes
    ignore_eos_needs_no_ids=True,
    fields=reply_fields,
    lowest=-9999.0,
    vocabulary=re.compile(r"[Vv]ocabulary size: (\d+)"),
)
"""vLLM's completions."""
