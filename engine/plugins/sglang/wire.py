"""SGLang's dialect: its names, where things stand in the reply of /generate, and how a request names its images.

The server echoes the ids that it received; they are compared as text, with a memcmp.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.plugins.servers.dialect import Dialect, ReplyFields
from engine.plugins.servers.wire import EncodedRequest, ReplyError, RequestEncoder
from engine.plugins.sglang.routing import routed_experts
from engine.schemas.generation import GenerateRequest, VersionSpan

if TYPE_CHECKING:
    from engine.tokens.vision import Vision

_COMPACT = "\0compact"
"""Suffix of an episode's id for its prompt with one placeholder per image, as it was sent."""
HASHED_BY_SERVER = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""Families for which SGLang 0.5.23 writes its own hashes into the prompt before it reads `mm_hashes`: its scheduler
ends where they differ. It keeps no features of their images."""


class Encoder(RequestEncoder):
    """Encodes requests with images, too."""

    def __init__(self, *, vision: Vision | None = None, features: Callable[[], str] = str, **options: Any) -> None:
        """
        Args:
            vision: The model's images, for a model with a vision tower.
            features: See `Control.features`.
            options: Those of `RequestEncoder`.
        """
        super().__init__(SGLANG, **options)
        self._vision, self._features = vision, features

    def _with_images(self, request: GenerateRequest, ids: np.ndarray, start: int) -> tuple[tuple[bytes, ...], bytes]:
        """The ids from `start` on with one placeholder an image, which the server expands itself; `image_data` and
        `mm_hashes`."""
        if self._vision is None or len(request.images) != len(request.image_spans):
            raise BackendError(
                f"{len(request.images)} images for {len(request.image_spans)} places in the prompt, of a model that "
                f"{'sees none' if self._vision is None else 'sees'}",
                kind="bad_prompt",
            )
        # A server leaves surplus images out without a word, and hangs on placeholders that are expanded already.
        first = bisect_left(request.image_spans, (start, 0))
        spans = [(begin - start, end - start) for begin, end in request.image_spans[first:]]
        compact = self._vision.compact(ids[start:], spans)
        sent = (self.text_of(compact),) if start else self._prompt(f"{request.episode_id}{_COMPACT}", compact)
        images = [image.image for image in request.images[first:]]
        if not images:
            return sent, b""
        uris = [b'"%b"' % self._vision.bank.scaled_uri(image).encode() for image in images]
        if self._vision.family.kind in HASHED_BY_SERVER:
            return sent, b',"image_data":[%b]' % b",".join(uris)
        names = [f"{image}{self._features()}".encode() for image in images]
        hashes = [b'"%b"' % sha256(name).hexdigest()[:16].encode() for name in names]
        return sent, b',"image_data":[%b],"mm_hashes":[%b]' % (b",".join(uris), b",".join(hashes))

    def forget(self, episode_id: str) -> None:
        super().forget(episode_id)
        super().forget(f"{episode_id}{_COMPACT}")


DEFAULT_VERSION = "default"
"""SGLang's name of the weights that it was started with; version 0 in the engine."""
_ECHO = b',"prompt_token_ids":['
_ROWS = b'"output_token_logprobs":['
_LAST = b",null]"
_CUT = b"[0]"


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
    output_token_logprobs: msgspec.Raw = msgspec.Raw()
    routed_experts: str | None = None
    queue_time: float | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Reply)
_ids_decoder = msgspec.json.Decoder(list[int])
_flat_decoder = msgspec.json.Decoder(list[float | int | None])
_rows_decoder = msgspec.json.Decoder(list[tuple[float | None, int, Any]])


def reply_fields(body: bytes | bytearray, sent: EncodedRequest) -> ReplyFields:
    """See `Dialect.fields`. The echo comes last: where it is ours, to the byte, it is not parsed."""
    end = len(body) - 2
    at = end - sent.prompt_bytes
    start = at - len(_ECHO)
    same = start > 0 and body.startswith(_ECHO, start) and sent.is_prompt(body, at, end) and body.endswith(b"]}")
    rest, flat = _without_rows(body[:start] + b"}" if same else body)
    reply = _decoder.decode(rest)
    meta, echo = reply.meta_info, reply.prompt_token_ids
    if flat is None or bytes(meta.output_token_logprobs) != _CUT:  # they were those of something else
        rows = _rows_decoder.decode(meta.output_token_logprobs or b"[]")
        logprobs, logprob_ids = [row[0] for row in rows], [row[1] for row in rows]
    else:
        logprobs, logprob_ids = flat[0::3], flat[1::3]
    # Read but once: where the ids of the rows, written down, are the ids of the reply, they are the same.
    raw = bytes(reply.output_ids)
    if msgspec.json.encode(logprob_ids) == raw and raw.find(b".") == raw.find(b"e") == raw.find(b"n") == -1:
        ids = logprob_ids  # 1.0, 1e3 and null are written otherwise
    else:
        ids = _ids_decoder.decode(reply.output_ids or b"[]")
    finish, matched = meta.finish_reason, meta.finish_reason.matched
    if isinstance(matched, list):  # a stop sequence of ids: its last one ended the reply
        matched = matched[-1] if matched else None
    spans, version = _versions(meta, len(ids))
    return ReplyFields(
        ids=ids,
        logprobs=logprobs,
        logprob_ids=logprob_ids,
        finish=finish.type,
        matched=matched if finish.type == "stop" else None,
        message=(finish.message or "aborted") if finish.type == "abort" else None,
        echoed=same or bool(echo),
        echo=_ids_decoder.decode(echo) if echo else None,
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
        rid=meta.id,
        queue_seconds=meta.queue_time or 0.0,
        spans=spans,
        version=version,
        experts=None if sent.experts_from is None else routed_experts(meta.routed_experts, sent, len(ids)),
    )


def _without_rows(body: bytes | bytearray) -> tuple[bytes | bytearray, list[Any] | None]:
    """A reply with `_CUT` in place of its rows `[log-prob, id, null]`, and these as one list `[log-prob, id, null,
    log-prob, …]`, which is read faster than rows are; the reply as it is, and None, where the rows have texts or
    another form."""
    start = body.find(_ROWS) + len(_ROWS)  # the quote before the colon ends a key: in a text it has a backslash
    end = body.rfind(_LAST, start) + len(_LAST)
    if not len(_ROWS) <= start < end:
        return body, None
    rows = body[start:end]
    opened = rows.replace(b"[", b"")
    try:
        flat = _flat_decoder.decode(b"".join((b"[", opened.replace(b"]", b" "), b"]")))
    except msgspec.DecodeError:
        return body, None
    # As many brackets as so many rows have, and a null at each one's end; another null is no id, and no finite value.
    if not 3 * (len(rows) - len(opened)) == 3 * flat[2::3].count(None) == len(flat):
        return body, None
    return body[:start] + _CUT[1:-1] + body[end:], flat


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


SGLANG = Dialect(
    servers="SGLang",
    path="/generate",
    abort_path="/abort_request",
    probe="/model_info",
    start="--model-path {folder}",
    prompt="input_ids",
    rid="rid",
    length="max_new_tokens",
    seed="sampling_seed",
    prefixes="extra_key",
    adapter="lora_path",
    echo="return_prompt_token_ids",
    echo_since="sglang 0.5.23",
    experts='"return_routed_experts":true,"routed_experts_start_len":%d',
    always={"return_logprob": True},
    parameters="sampling_params",
    ban=-1e9,
    fields=reply_fields,
    vocabulary=re.compile(r"\[0, (\d+)\]"),
    first_id=1,
)
"""SGLang's `/generate`. What a request leaves out is SGLang's default."""
