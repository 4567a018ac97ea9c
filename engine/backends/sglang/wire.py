"""A generation request -> the body of a request to /generate; the body of its reply -> ids and log-probs, or an error.

The server echoes the ids that it received; they are compared as text, with a memcmp.

Invariant: a reply is accepted only if the prompt that the server echoed is the one that was sent, each sampled id has exactly
one log-prob of the same id, and all ids lie in the vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

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
from engine.backends.sglang.routing import routed_experts
from engine.errors import BackendError
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from engine.tokens.experts import ExpertLayout
    from engine.tokens.vision import Vision

BANNED = -1e9
"""Logit bias of a banned id; JSON has no infinity."""
_COMPACT = "\0compact"
"""Suffix of an episode's id for its prompt with one placeholder per image, as it was sent."""


HASHED_BY_SERVER = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""Families for which SGLang 0.5.23 writes its own hashes into the prompt before it reads `mm_hashes`: its scheduler ends where they
differ. It keeps no features of their images."""


class Encoder(PromptEncoder):
    """Encodes requests to /generate."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seeded: bool = False,
        echo: bool = True,
        memory: int = 256 << 20,
        vision: Vision | None = None,
        layout: ExpertLayout | None = None,
        own_prefixes: bool = False,
        features: Callable[[], str] = str,
    ) -> None:
        """
        Args:
            vocab_size: Ids must be below it: a larger id would end the whole server.
            seeded: Send the request's seed; a server without deterministic inference ignores it.
            echo: Ask for an echo of the prompt's ids.
            memory: Maximum size of the kept prompts in bytes; dropped prompts are encoded again.
            vision: The model's images, for a model with a vision tower.
            layout: The model's experts, where requests ask for them.
            own_prefixes: A request uses only cached prefixes of its own episode in this run.
            features: See `Control.features`.
        """
        super().__init__(vocab_size=vocab_size, memory=memory)
        self._layout = layout
        self._own_prefixes = f"{secrets.token_hex(8)}/" if own_prefixes else None
        self._vision = vision
        self._features = features
        self.seeded = seeded
        self.echo = echo

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
        sent, images = prompt, b""
        if request.images:
            sent, images = self._with_images(request, ids)
        if self._own_prefixes is not None:
            prefixes = f"{self._own_prefixes}{prefixes or ''}/{request.episode_id}"
        fields = b'"max_new_tokens":%d' % max_new_tokens
        if sampling := self._sampling_text(request, sampled):
            fields = b"%b,%b" % (sampling, fields)
        if self.seeded:
            fields = b'%b,"sampling_seed":%d' % (fields, request.seed)
        head = b'{"rid":%b,"input_ids":[' % msgspec.json.encode(rid)
        tail = b'],"return_logprob":true,"return_prompt_token_ids":%b%b%b%b%b,"sampling_params":{%b}}' % (
            b"true" if self.echo else b"false",
            images,
            b""
            if request.experts_from is None
            else b',"return_routed_experts":true,"routed_experts_start_len":%d' % request.experts_from,
            b"" if prefixes is None else b',"extra_key":' + msgspec.json.encode(prefixes),
            b"" if request.adapter is None else b',"lora_path":' + msgspec.json.encode(request.adapter),
            fields,
        )
        return EncodedRequest(
            (head, sent, tail),
            rid,
            prompt,
            ids,
            max_new_tokens,
            request.experts_from,
            self._layout,
        )

    async def scale_images(self, request: GenerateRequest) -> None:
        """Scale the request's images for the server, in a thread, so that `encode` finds them.

        Raises:
            ImageError: One of them cannot be sent exactly.
        """
        for image in request.images:
            if self._vision is not None and not self._vision.bank.is_scaled(image.image):
                await asyncio.to_thread(self._vision.bank.scaled_uri, image.image)

    def _with_images(self, request: GenerateRequest, ids: np.ndarray) -> tuple[bytes, bytes]:
        """The ids with one placeholder an image, which the server expands itself; `image_data` and `mm_hashes`."""
        if self._vision is None or len(request.images) != len(request.image_spans):
            raise BackendError(
                f"{len(request.images)} images for {len(request.image_spans)} places in the prompt, of a model that "
                f"{'sees none' if self._vision is None else 'sees'}",
                kind="bad_prompt",
            )
        # A server leaves surplus images out without a word, and hangs on placeholders that are expanded already.
        sent = self._prompt(f"{request.episode_id}{_COMPACT}", self._vision.compact(ids, request.image_spans))
        uris = [b'"%b"' % self._vision.bank.scaled_uri(image.image).encode() for image in request.images]
        if self._vision.family.kind in HASHED_BY_SERVER:
            return sent, b',"image_data":[%b]' % b",".join(uris)
        names = [f"{image.image}{self._features()}".encode() for image in request.images]
        hashes = [b'"%b"' % sha256(name).hexdigest()[:16].encode() for name in names]
        return sent, b',"image_data":[%b],"mm_hashes":[%b]' % (b",".join(uris), b",".join(hashes))

    def forget(self, episode_id: str) -> None:
        super().forget(episode_id)
        super().forget(f"{episode_id}{_COMPACT}")

    def dump(self, sampling: SamplingParams, request: GenerateRequest) -> bytes:
        fields = sampling_fields(sampling)
        if request.stop_token_ids:
            fields["stop_token_ids"] = list(request.stop_token_ids)
        if request.banned_token_ids:
            fields["logit_bias"] = {
                **fields.get("logit_bias", {}),
                **{str(token): BANNED for token in request.banned_token_ids},
            }
        return msgspec.json.encode(fields)[1:-1]


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are set, by SGLang's names; what is left out is SGLang's default. Without the length."""
    fields = sampling.model_dump(exclude_none=True, exclude={"max_new_tokens"})
    return {name: value for name, value in fields.items() if value not in ([], {})}


DEFAULT_VERSION = "default"
"""SGLang's name of the weights that it was started with; version 0 in the engine."""
_ECHO = b',"prompt_token_ids":['


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    id: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | int | None = None
    weight_versions: list[_Span] = []
    output_token_logprobs: msgspec.Raw = msgspec.Raw(b"[]")
    routed_experts: str | None = None
    e2e_latency: float | None = None
    queue_time: float | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Reply)
_ids_decoder = msgspec.json.Decoder(list[int])
_flat_decoder = msgspec.json.Decoder(list[float | int | None])
_rows_decoder = msgspec.json.Decoder(list[tuple[float | None, int, Any]])


def decode(body: bytes, sent: EncodedRequest, vocab_size: int) -> ReplyPart:
    """Read the reply to a request and check it against the request.

    Raises:
        ReplyError: It is not JSON, lacks something, or contradicts itself or the request.
        PromptMismatch: The server worked on another prompt.
    """
    reply, seen = _read(body, sent)
    meta = reply.meta_info
    if meta.id and meta.id != sent.rid:  # before anything else: the rest is another request's
        raise ReplyError(f"it answers request {meta.id!r}, not {sent.rid!r}")
    echoed = seen is not _NOT_ECHOED
    if echoed and seen is not None and seen != sent.ids.tolist():
        raise PromptMismatch(sent.ids, seen)
    try:
        values, tokens = _columns(meta.output_token_logprobs)
        # Read but once: where the ids of the rows, written down, are the ids of the reply, they are the same.
        raw = bytes(reply.output_ids)
        same = (
            msgspec.json.encode(tokens) == raw and b"." not in raw and b"e" not in raw and b"n" not in raw
        )  # 1.0, 1e3, null
        ids = tokens if same else _ids_decoder.decode(reply.output_ids or b"[]")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyError(f"its tokens and log-probs are not what SGLang answers: {error}") from None
    if meta.prompt_tokens is not None and meta.prompt_tokens != len(sent.ids):
        raise ReplyError(f"it counts {meta.prompt_tokens} prompt tokens where {len(sent.ids)} were sent")
    if len(ids) > sent.max_new_tokens:
        raise ReplyError(f"it holds {len(ids)} tokens where at most {sent.max_new_tokens} were asked for")
    finish = _finish(meta.finish_reason)
    if finish.type != "abort" and meta.completion_tokens not in (None, len(ids)):
        raise ReplyError(f"it counts {meta.completion_tokens} tokens and holds {len(ids)}")
    if not same and tokens != ids:
        raise ReplyError(f"its {len(tokens)} log-probs are not those of its {len(ids)} tokens")
    array, logprobs = arrays(ids, values, vocab_size)
    versions, version = _versions(meta, len(ids))
    return ReplyPart(
        ids=array,
        logprobs=logprobs,
        finish=finish,
        versions=versions,
        version=version,
        prompt_tokens=len(sent.ids),
        cached_tokens=meta.cached_tokens,
        queue_seconds=meta.queue_time or 0.0,
        echoed=echoed,
        experts=None if sent.experts_from is None else routed_experts(meta.routed_experts, sent, len(ids)),
    )


_NOT_ECHOED: list[int] = []


def _read(body: bytes, sent: EncodedRequest) -> tuple[_Reply, list[int] | None]:
    """The reply, and the prompt that it echoes: None for ours, `_NOT_ECHOED` for none.

    The echo comes last: where it is ours, to the byte, it is not parsed.
    """
    end = len(body) - len(sent.prompt) - 2
    start = end - len(_ECHO)
    same = start > 0 and body.startswith(_ECHO, start) and body.startswith(sent.prompt, end) and body.endswith(b"]}")
    try:
        reply = _decoder.decode(body[:start] + b"}" if same else body)
        if same and not reply.prompt_token_ids:
            return reply, None
        if not reply.prompt_token_ids:
            return reply, _NOT_ECHOED
        return reply, _ids_decoder.decode(reply.prompt_token_ids)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyError(f"it is not what SGLang answers: {error}") from None


def _columns(rows: msgspec.Raw) -> tuple[list[Any], list[Any]]:
    """Log-probs and ids out of `[[logprob, id, text], …]`.

    Without texts the rows are `[a,b,null]`: without their brackets they are one flat list, which is read faster than
    rows are.
    """
    raw = bytes(rows)
    inner = raw.translate(None, b"[]")
    if b'"' not in raw:  # brackets in a text would be part of it
        try:
            flat = _flat_decoder.decode(b"[%b]" % inner)
        except msgspec.DecodeError:  # rows of another form
            flat = []
        count = len(flat) // 3
        # As many brackets as so many rows have, and a null at each one's end; another null is no id, and no finite value.
        if len(flat) == 3 * count and len(raw) - len(inner) == 2 * (count + 1) and flat[2::3].count(None) == count:
            return flat[0::3], flat[1::3]
    decoded = _rows_decoder.decode(rows)
    return [row[0] for row in decoded], [row[1] for row in decoded]


def _finish(finish: _Finish) -> FinishReason:
    if finish.type == "abort":
        return ending("abort", None, finish.message or "aborted")
    if finish.type == "length":
        return ending("length", None, None)
    if finish.type == "stop":
        matched = finish.matched
        if isinstance(matched, list):  # a stop sequence of ids: its last one ended the reply
            matched = matched[-1] if matched else None
        return ending("stop", matched, None)
    raise ReplyError(f"it ended for an unknown reason, {finish.type!r}")


@lru_cache(256)
def version_number(name: str | int) -> int:
    """A weight version as an integer.

    SGLang's versions are strings. A decimal number is itself and `default` is 0; any other name becomes a
    number in [2**30, 2**31) that depends on the name alone, so it fits int32 and is not taken for a step.
    """
    text = str(name)
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    if text == DEFAULT_VERSION:
        return 0
    return (zlib.crc32(text.encode()) & 0x3FFFFFFF) | 0x40000000


@lru_cache(4096)
def _span(version: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=0, end=end)


def _versions(meta: _Meta, tokens: int) -> tuple[list[VersionSpan], str | None]:
    """The versions of the tokens, and the last weights' own name."""
    spans = meta.weight_versions
    if not spans:
        name = meta.weight_version
        if name is None:
            return [], None
        return [_span(version_number(name), tokens)] if tokens else [], str(name)
    last = str(spans[-1].version)
    if len(spans) == 1 and spans[0].start == 0 and spans[0].end == tokens:
        return [_span(version_number(spans[0].version), tokens)] if tokens else [], last
    spans = [span for span in spans if span.end > span.start]
    at = 0
    for span in spans:
        if span.start != at:
            raise ReplyError(f"its weight versions leave a gap at token {at}")
        at = span.end
    if at != tokens:
        raise ReplyError(f"its weight versions cover {at} of {tokens} tokens")
    versions = [VersionSpan(version=version_number(span.version), start=span.start, end=span.end) for span in spans]
    return versions, last
