"""A generation request -> the text that a server takes; its reply -> checked ids and log-probs, joined where it was
interrupted.

A prompt grows from turn to turn, so the JSON text of its ids is kept in pieces and only the new ids are encoded and
checked; a byte of it is copied again only when its text has doubled.

Invariants:
- The text that is sent holds exactly `input_ids`, and all of them lie in the vocabulary.
- A reply is accepted only if the prompt that the server reports is the one that was sent, each sampled id has exactly
  one log-prob of the same id, and all ids lie in the vocabulary.
- The kept tokens of an interrupted reply were sampled, each with its own log-prob and weight version. A reply with
  something that depends on the whole of it (a stop string across the cut, a grammar, repetition penalties) starts
  again, or continues a few tokens earlier.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.errors import BackendError
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, SamplingParams, VersionSpan
from engine.tokens.experts import ExpertLayout

if TYPE_CHECKING:
    from engine.plugins.servers.dialect import Dialect
    from engine.plugins.servers.sessions import Session

_FINISHES = ("stop", "length", "abort")
_META_BYTES = 1 << 20
_TOKEN_BYTES = 1024
_CHOICE_BYTES = 6
"""Bytes of one choice of an expert in base64: at most 5.4, of an int32."""


class EncodedRequest(msgspec.Struct, frozen=True):
    """The body of one request."""

    pieces: tuple[bytes, ...]
    rid: str
    prompt: tuple[bytes, ...]
    """The prompt's ids as JSON, without the brackets, in pieces; the server must echo them."""
    prompt_bytes: int
    """Size of these pieces together."""
    ids: np.ndarray
    """The same as int32 [tokens]. What is sent instead, where there are images, holds one placeholder for each."""
    max_new_tokens: int
    session: Session | None = None
    """The server's session that it belongs to."""
    in_session: int = 0
    """How many of `ids` the session has: they are not sent, and `prompt` holds the others."""
    experts_from: int | None = None
    """The experts of the tokens from this one on are requested; None: none are."""
    layout: ExpertLayout | None = None
    """With `experts_from`: the sizes that they must have."""

    def is_prompt(self, text: bytes | bytearray, start: int, end: int) -> bool:
        """Whether text[start:end] is the prompt's JSON."""
        for piece in self.prompt:
            if not text.startswith(piece, start):
                return False
            start += len(piece)
        return start == end

    @property
    def most(self) -> int:
        """Bytes that a reply may have: the prompt's ids, the sampled tokens with id, log-prob and text, experts, and
        the rest."""
        plain = _META_BYTES + 2 * self.prompt_bytes + _TOKEN_BYTES * self.max_new_tokens
        if self.experts_from is None or self.layout is None:
            return plain
        tokens = len(self.ids) + self.max_new_tokens - self.experts_from
        return plain + _CHOICE_BYTES * self.layout.layers * self.layout.top_k * tokens


class RequestEncoder:
    """Writes requests in a dialect. It keeps the prompts of the newest episodes, up to `memory` bytes."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        vocab_size: int,
        seeded: bool = True,
        echo: bool = True,
        own_prefixes: bool = False,
        layout: ExpertLayout | None = None,
        memory: int = 256 << 20,
    ) -> None:
        """
        Args:
            dialect: That of the servers.
            vocab_size: Ids must be below it: a larger id would end some servers.
            seeded: Send the request's seed.
            echo: Ask for the ids of the prompt.
            own_prefixes: A request uses only cached prefixes of its own episode in this run.
            layout: The model's experts, where requests ask for them.
            memory: Maximum size of the kept prompts in bytes; dropped prompts are encoded again.
        """
        self.dialect, self.vocab_size, self.seeded = dialect, vocab_size, seeded
        self._layout = layout
        self._own_prefixes = f"{secrets.token_hex(8)}/" if own_prefixes else None
        self._memory = memory
        self._used = 0
        self._known: OrderedDict[str, tuple[np.ndarray, tuple[bytes, ...], int]] = OrderedDict()
        """By episode: the ids of the newest prompt, the tape's own where they are read-only, since what is on a tape is
        never changed; their JSON, without the brackets, each piece more than twice as long as the next; the bytes of
        both."""
        self._sampling: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[SamplingParams, bytes]] = {}
        fixed = msgspec.json.encode({**dialect.always, dialect.echo: echo}).decode()[1:-1]
        opening, closing = (f'"{dialect.parameters}":{{', "}}") if dialect.parameters else ("", "}")
        self._head = f'{{"{dialect.rid}":%b,"{dialect.prompt}":['.encode()
        self._tail = f'],{fixed}%b%b%b%b,{opening}%b,"{dialect.length}":%d%b{closing}'.encode()
        self._seed_field, self._prefixes_field, self._adapter_field = (
            f',"{name}":'.encode() for name in (dialect.seed, dialect.prefixes, dialect.adapter)
        )
        self._experts_fields = f",{dialect.experts}".encode()

    def encode(
        self,
        request: GenerateRequest,
        rid: str,
        ids: np.ndarray,
        max_new_tokens: int,
        sampled: int = 0,
        *,
        prefixes: str | None = None,
        session: Session | None = None,
    ) -> EncodedRequest:
        """The body that asks for up to `max_new_tokens` after `ids`.

        Args:
            request: everything else.
            rid: the server's name for this attempt; no other attempt's may begin with it.
            ids: int32 [tokens]: `request.input_ids`, and what was sampled of this reply already.
            max_new_tokens: most tokens to sample now.
            sampled: how many of `ids` were sampled already; `min_new_tokens` counts them.
            prefixes: cached prefixes are shared among requests that give the same name here.
            session: the server's session that the request belongs to.

        Raises:
            BackendError: an id is outside the vocabulary (kind `bad_prompt`).
        """
        prompt = self._prompt(request.episode_id, ids)
        if in_session := 0 if session is None else session.covers(ids):
            prompt = (self.text_of(ids[in_session:]),)
        sent, images = self._with_images(request, ids, in_session) if request.images else (prompt, b"")
        if self._own_prefixes is not None:
            prefixes = f"{self._own_prefixes}{prefixes or ''}/{request.episode_id}"
        tail = self._tail % (
            images if session is None else images + session.fields(in_session),
            b"" if request.experts_from is None else self._experts_fields % request.experts_from,
            b"" if prefixes is None else self._prefixes_field + msgspec.json.encode(prefixes),
            b"" if request.adapter is None else self._adapter_field + msgspec.json.encode(request.adapter),
            self._sampling_text(request, sampled),
            max_new_tokens,
            b"%b%d" % (self._seed_field, request.seed) if self.seeded else b"",
        )
        return EncodedRequest(
            (self._head % msgspec.json.encode(rid), *sent, tail),
            rid,
            prompt,
            sum(map(len, prompt)),
            ids,
            max_new_tokens,
            session,
            in_session,
            request.experts_from,
            self._layout,
        )

    def _with_images(self, request: GenerateRequest, ids: np.ndarray, start: int) -> tuple[tuple[bytes, ...], bytes]:
        """The ids of a prompt with images from `start` on, as they are sent, and the fields with these images."""
        raise BackendError(
            f"{self.dialect.servers} takes no images with a prompt of token ids: use `backend: {{kind: sglang}}` or "
            "`{kind: local}`",
            kind="unsupported",
        )

    def text_of(self, ids: np.ndarray) -> bytes:
        """The JSON of ids, int32 [tokens], without the brackets."""
        return msgspec.json.encode(ids.tolist())[1:-1]

    def forget(self, episode_id: str) -> None:
        """Drop the prompt of an episode that has ended."""
        prompt = self._known.pop(episode_id, None)
        if prompt is not None:
            self._used -= prompt[2]

    def _prompt(self, episode_id: str, ids: np.ndarray) -> tuple[bytes, ...]:
        tail: np.ndarray = ids
        text: tuple[bytes, ...] = ()
        if (before := self._known.get(episode_id)) is not None and begins_with(ids, before[0]):
            tail, text = ids[before[0].size :], before[1]
        if tail.size:
            unsigned = tail.view(np.uint32)  # a negative id is the largest
            at = int(unsigned.argmax())
            if unsigned.item(at) >= self.vocab_size:
                raise BackendError(
                    f"token {len(ids) - len(tail) + at} of the prompt is id {int(tail[at])}; the model's vocabulary is "
                    f"[0, {self.vocab_size}), and such an id can end the server",
                    kind="bad_prompt",
                )
            text = _longer(text, self.text_of(tail))
        self.forget(episode_id)
        size = ids.nbytes + sum(map(len, text))
        self._known[episode_id] = ids.copy() if ids.flags.writeable else ids, text, size
        self._used += size
        while self._used > self._memory and len(self._known) > 1:
            self.forget(next(iter(self._known)))
        return text

    def _sampling_text(self, request: GenerateRequest, sampled: int) -> bytes:
        """All sampling parameters except length and seed, as JSON without the braces; encoded once per spec."""
        if sampled and request.sampling.min_new_tokens:
            left = max(0, request.sampling.min_new_tokens - sampled)
            return self._dump(request.sampling.model_copy(update={"min_new_tokens": left}), request)
        key = (id(request.sampling), tuple(request.stop_token_ids), tuple(request.banned_token_ids))
        encoded = self._sampling.get(key)
        if encoded is None:
            if len(self._sampling) >= 64:
                self._sampling.clear()
            # the object is kept with its text, so that its id cannot be reused
            encoded = self._sampling[key] = (request.sampling, self._dump(request.sampling, request))
        return encoded[1]

    def _dump(self, sampling: SamplingParams, request: GenerateRequest) -> bytes:
        fields = self.dialect.sampling_fields(sampling, request.stop_token_ids, request.banned_token_ids)
        return msgspec.json.encode(fields)[1:-1]


def begins_with(ids: np.ndarray, before: np.ndarray) -> bool:
    """Whether a prompt begins with an earlier one, both int32 [tokens]. Read-only views of one buffer are a tape's,
    which only grows: they are not compared."""
    if ids.base is before.base is not None and not ids.flags.writeable and not before.flags.writeable:
        same_start = ids.__array_interface__["data"] == before.__array_interface__["data"]
        return same_start and ids.size >= before.size
    return before.tobytes() == ids[: before.size].tobytes()  # as bytes: a fifth of the cost


def _longer(text: tuple[bytes, ...], new: bytes) -> tuple[bytes, ...]:
    """Pieces of JSON and the next one. A byte is copied as many times as its text doubles."""
    if not text:
        return (new,)
    pieces = [*text, b",%b" % new]
    while len(pieces) > 1 and len(pieces[-2]) <= 2 * len(pieces[-1]):
        last = pieces.pop()
        pieces[-1] += last
    return tuple(pieces)


_FLOAT32_MAX = float(np.finfo(np.float32).max)
ROUNDING = 1e-5
"""Maximum log-prob: float32 rounding can bring the log of a probability of 1 above 0."""


class ReplyError(Exception):
    """A reply is unusable; another try may succeed."""


class ReplyPart(msgspec.Struct, frozen=True):
    """One reply of the server: a whole generation, or what was sampled before it was interrupted."""

    ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens]"""
    finish: FinishReason
    versions: list[VersionSpan]
    """Cover [0, tokens)."""
    version: str | None
    """The last weights' own name."""
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    echoed: bool
    """Whether the server's prompt was compared with the one that was sent."""
    experts: np.ndarray | None = None
    """[tokens, layers, top_k]: the experts of the tokens from `EncodedRequest.experts_from` up to the last but one."""


class PromptMismatch(BackendError):
    """The server worked on another prompt than the one it was sent.

    It shows the first difference between the ids that were sent, shape [n], and those that the server saw.
    """

    def __init__(self, sent: np.ndarray, seen: Sequence[int]) -> None:
        at = next(
            (i for i, (a, b) in enumerate(zip(sent.tolist(), seen, strict=False)) if a != b), min(len(sent), len(seen))
        )
        self.at = at
        window = slice(max(0, at - 2), at + 3)
        super().__init__(
            f"the server's prompt is not the one it was sent: they differ at token {at}. Sent {sent[window].tolist()} "
            f"({len(sent)} tokens), the server saw {list(seen[window])} ({len(seen)} tokens), from token "
            f"{window.start} on",
            kind="prompt_mismatch",
        )


def read_reply(dialect: Dialect, body: bytes | bytearray, sent: EncodedRequest, vocab_size: int) -> ReplyPart:
    """Read the reply to a request and check it against the request.

    Raises:
        ReplyError: It is not what such servers answer, lacks something, or contradicts itself or the request.
        PromptMismatch: The server worked on another prompt.
    """
    try:
        reply = dialect.fields(body, sent)
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise ReplyError(f"it is not what {dialect.servers} answers: {error}") from None
    if reply.rid and reply.rid != sent.rid:  # before anything else: the rest is another request's
        raise ReplyError(f"it answers request {reply.rid!r}, not {sent.rid!r}")
    if reply.echo is not None and reply.echo != (new := sent.ids[sent.in_session :]).tolist():
        raise PromptMismatch(new, reply.echo)
    if sent.in_session and (not reply.echoed or reply.prompt_tokens is None):
        raise ReplyError("it does not say which prompt it had in its session")
    ids, count, prompt_tokens = reply.ids, len(reply.ids), len(sent.ids)
    if reply.prompt_tokens is not None and reply.prompt_tokens != prompt_tokens:
        raise ReplyError(f"it counts {reply.prompt_tokens} prompt tokens where {prompt_tokens} were sent")
    if count > sent.max_new_tokens:
        raise ReplyError(f"it holds {count} tokens where at most {sent.max_new_tokens} were asked for")
    if reply.finish != "abort" and reply.completion_tokens not in (None, count):
        raise ReplyError(f"it counts {reply.completion_tokens} tokens and holds {count}")
    if len(reply.logprobs) != count or (reply.logprob_ids is not ids and reply.logprob_ids != ids):
        raise ReplyError(f"its {len(reply.logprobs)} log-probs are not those of its {count} tokens")
    if reply.finish not in _FINISHES:
        raise ReplyError(f"it ended for an unknown reason, {reply.finish!r}")
    array, logprobs = _arrays(ids, reply.logprobs, vocab_size)
    if dialect.lowest is not None and count and logprobs.min() <= dialect.lowest:
        raise ReplyError(f"token {int(logprobs.argmin())} has probability 0")
    return ReplyPart(
        array,
        logprobs,
        _ending(reply.finish, reply.matched, reply.message),
        reply.spans,
        reply.version,
        prompt_tokens,
        reply.cached_tokens,
        reply.queue_seconds,
        reply.echoed,
        reply.experts,
    )


def _arrays(ids: list[int], values: list[Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sampled ids and their log-probs, as int32 [tokens] and float32 [tokens], both read-only.

    Raises:
        ReplyError: An id is outside the vocabulary, or a log-prob is not finite or above 0.
    """
    # Python's own `max` and `sum` over lists cost a turn less than NumPy's, whose code is no longer in the cache; a
    # packer costs half of `np.array`, and `I` takes no negative id.
    try:
        array = np.frombuffer(_packer(f"{len(ids)}I")(*ids), np.int32)
        inside = not ids or max(ids) < vocab_size
    except struct.error:
        inside = False
    if not inside:
        raise ReplyError(f"it holds an id outside the vocabulary of {vocab_size}")
    try:
        finite = math.isfinite(sum(values))
        logprobs = np.frombuffer(_packer(f"{len(values)}f")(*values), np.float32) if finite else None
    except (TypeError, OverflowError):  # a null among them; one too large
        logprobs = None
    if logprobs is None:
        at = next(at for at, value in enumerate(values) if value is None or not abs(value) <= _FLOAT32_MAX)
        raise ReplyError(f"token {at} has no finite log-prob")
    if values and max(values) > ROUNDING:
        at = next(at for at, value in enumerate(values) if value > ROUNDING)
        raise ReplyError(f"token {at} has the log-prob {values[at]:g}; none is above 0")
    return array, logprobs


@lru_cache(4096)
def _packer(form: str) -> Callable[..., bytes]:
    return struct.Struct(form).pack


@lru_cache(256)
def _ending(kind: str, matched: int | str | None, message: str | None) -> FinishReason:
    """A `FinishReason`, kept: replies end in few ways."""
    return FinishReason.read({"type": kind, "matched": matched, "message": message})


TAIL = 64
"""Number of tokens before the cut that are decoded to find the beginning of a stop string."""


def can_resume(sampling: SamplingParams) -> bool:
    """Whether the rest of a reply may be sampled in a request of its own.

    A server applies penalties, grammars and expressions only to what it samples in one request.
    """
    of_whole_reply = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.json_schema,
        sampling.regex,
        sampling.ebnf,
        sampling.structural_tag,
        sampling.stop_regex,
    )
    return not any(of_whole_reply) and sampling.repetition_penalty in (None, 1.0)


def clean_cut(ids: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """How many of `ids` may stay, so that no stop string can begin before the cut and end after it.

    Args:
        ids: what was sampled.
        stops: the stop strings; the server looks for them in what it samples itself.
        decode: ids to text.

    Returns:
        At most len(ids): the longest beginning whose text does not end in the beginning of a stop string
        or in the middle of a character.
    """
    if not stops:
        return len(ids)
    count = len(ids)
    while count:
        text = decode(list(ids[max(0, count - TAIL) : count]))
        if not text.endswith("�") and not any(
            text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop))
        ):
            return count
        count -= 1
    return 0


def cut(part: ReplyPart, count: int) -> ReplyPart:
    """The first `count` tokens of a part."""
    versions = [
        span if span.end <= count else VersionSpan(version=span.version, start=span.start, end=count)
        for span in part.versions
        if span.start < count
    ]
    removed = len(part.ids) - count
    experts = part.experts if part.experts is None or not removed else part.experts[: len(part.experts) - removed]
    return replace(part, ids=part.ids[:count], logprobs=part.logprobs[:count], versions=versions, experts=experts)


def join(parts: Sequence[ReplyPart], finish: FinishReason, seconds: float) -> Generation:
    """One generation out of its parts, in order; at least one.

    Args:
        parts: each begins where the one before it ends.
        finish: how the whole ended.
        seconds: how long it took.
    """
    first = parts[0]
    if len(parts) == 1:
        return Generation(
            output_ids=first.ids,
            logprobs=first.logprobs,
            finish=finish,
            versions=first.versions,
            prompt_tokens=first.prompt_tokens,
            prompt_unchecked=not first.echoed,
            cached_tokens=first.cached_tokens,
            seconds=seconds,
            queue_seconds=first.queue_seconds,
            routed_experts=first.experts,
        )
    # each part has the experts of the tokens for which no earlier part had any
    experts = [part.experts for part in parts if part.experts is not None]
    return Generation(
        output_ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish=finish,
        versions=_join_versions(parts),
        prompt_tokens=first.prompt_tokens,
        prompt_unchecked=not all(part.echoed for part in parts),
        cached_tokens=first.cached_tokens,
        seconds=seconds,
        queue_seconds=sum(part.queue_seconds for part in parts),
        routed_experts=np.concatenate(experts) if experts else None,
    )


def _join_versions(parts: Sequence[ReplyPart]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    at = 0
    for part in parts:
        of_part = part.versions or [VersionSpan(version=0, start=0, end=len(part.ids))]
        for span in of_part:
            if span.end == span.start:
                continue
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(version=span.version, start=spans[-1].start, end=at + span.end)
            else:
                spans.append(VersionSpan(version=span.version, start=at + span.start, end=at + span.end))
        at += len(part.ids)
    return spans
