"""The bodies of replies of /v1/completions.

Invariant: a reply is accepted only if the prompt that the server echoed is the one that was sent, each sampled id has exactly
one log-prob of the same id, and all ids lie in the vocabulary.
"""

from __future__ import annotations

from itertools import repeat

import msgspec

from engine.backends.servers.reply import PromptMismatch, ReplyError, ReplyPart, arrays, ending
from engine.backends.servers.request import EncodedRequest
from engine.schemas.generation import FinishReason

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
