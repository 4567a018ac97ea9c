"""The bodies of requests to /generate.

A prompt grows from turn to turn, so the JSON text of its ids is kept and only the new ids are encoded: the cost of a turn does
not depend on its length.

Invariant: the text that is sent holds exactly `input_ids`, and all of them lie in the vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.tokens.vision import Vision

BANNED = -1e9
"""Logit bias of a banned id; JSON has no infinity."""
_COMPACT = "\0compact"
"""Suffix of an episode's id for its prompt with one placeholder per image, as it was sent."""
_META_BYTES = 1 << 20
_TOKEN_BYTES = 1024


class Outgoing(msgspec.Struct, frozen=True):
    """A body for /generate."""

    pieces: tuple[bytes, ...]
    rid: str
    prompt: bytes
    """The prompt's ids as JSON, without the brackets; the server must echo them."""
    ids: np.ndarray
    """The same as int32 [tokens]. What is sent instead, where there are images, holds one placeholder for each."""
    max_new_tokens: int

    @property
    def most(self) -> int:
        """Bytes that a reply may have: the prompt's ids, the sampled tokens with id, log-prob and text, and the rest."""
        return _META_BYTES + 2 * len(self.prompt) + _TOKEN_BYTES * self.max_new_tokens


class _Known(msgspec.Struct, frozen=True):
    ids: np.ndarray
    """Of a prompt that was sent: the tape's own where they are read-only, since what is on a tape is never changed."""
    text: bytes
    """Their JSON, without the brackets."""


class Encoder:
    """Encodes requests. It keeps the prompts of the newest episodes, up to `memory` bytes."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seeded: bool = False,
        echo: bool = True,
        memory: int = 256 << 20,
        vision: Vision | None = None,
    ) -> None:
        """
        Args:
            vocab_size: Ids must be below it: a larger id would end the whole server.
            seeded: Send the request's seed; a server without deterministic inference ignores it.
            echo: Ask for an echo of the prompt's ids.
            memory: Maximum size of the kept prompts in bytes; dropped prompts are encoded again.
            vision: The model's images, for a model with a vision tower.
        """
        self._vision = vision
        self.vocab_size = vocab_size
        self.seeded = seeded
        self.echo = echo
        self._memory = memory
        self._used = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._sampling: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[SamplingParams, bytes]] = {}

    def encode(
        self,
        request: GenerateRequest,
        rid: str,
        ids: np.ndarray,
        max_new_tokens: int,
        sampled: int = 0,
        *,
        prefixes: str | None = None,
    ) -> Outgoing:
        """The body that asks for up to `max_new_tokens` after `ids`.

        Args:
            request: everything else.
            rid: the server's name for this attempt; no other attempt's may begin with it.
            ids: int32 [tokens]: `request.input_ids`, and what was sampled of this reply already.
            max_new_tokens: most tokens to sample now.
            sampled: how many of `ids` were sampled already; `min_new_tokens` counts them.
            prefixes: cached prefixes are shared among requests that give the same name here.

        Raises:
            BackendError: an id is outside the vocabulary (kind `bad_prompt`).
        """
        prompt = self._prompt(request.episode_id, ids)
        sent, images = prompt, b""
        if request.images:
            sent, images = self._with_images(request, ids)
        fields = b'"max_new_tokens":%d' % max_new_tokens
        if sampling := self._sampling_text(request, sampled):
            fields = b"%b,%b" % (sampling, fields)
        if self.seeded:
            fields = b'%b,"sampling_seed":%d' % (fields, request.seed)
        head = b'{"rid":%b,"input_ids":[' % msgspec.json.encode(rid)
        tail = b'],"return_logprob":true,"return_prompt_token_ids":%b%b%b%b,"sampling_params":{%b}}' % (
            b"true" if self.echo else b"false",
            images,
            b"" if prefixes is None else b',"extra_key":' + msgspec.json.encode(prefixes),
            b"" if request.adapter is None else b',"lora_path":' + msgspec.json.encode(request.adapter),
            fields,
        )
        return Outgoing((head, sent, tail), rid, prompt, ids, max_new_tokens)

    async def scale_images(self, request: GenerateRequest) -> None:
        """Scale the request's images for the server, in a thread, so that `encode` finds them.

        Raises:
            ImageError: One of them cannot be sent exactly.
        """
        for image in request.images:
            if self._vision is not None and not self._vision.bank.is_scaled(image.image):
                await asyncio.to_thread(self._vision.bank.scaled_uri, image.image)

    def _with_images(self, request: GenerateRequest, ids: np.ndarray) -> tuple[bytes, bytes]:
        """The ids with one placeholder an image, which the server expands itself, and `image_data`."""
        if self._vision is None or len(request.images) != len(request.image_spans):
            raise BackendError(
                f"{len(request.images)} images for {len(request.image_spans)} places in the prompt, of a model that "
                f"{'sees none' if self._vision is None else 'sees'}",
                kind="bad_prompt",
            )
        # A server leaves surplus images out without a word, and hangs on placeholders that are expanded already.
        sent = self._prompt(f"{request.episode_id}{_COMPACT}", self._vision.compact(ids, request.image_spans))
        uris = [b'"%b"' % self._vision.bank.scaled_uri(image.image).encode() for image in request.images]
        return sent, b',"image_data":[%b]' % b",".join(uris)

    def forget(self, episode_id: str) -> None:
        """Drop the prompt of an episode that has ended."""
        for key in (episode_id, f"{episode_id}{_COMPACT}"):
            self._drop(key)

    def _drop(self, key: str) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._used -= known.ids.nbytes + len(known.text)

    def _prompt(self, episode_id: str, ids: np.ndarray) -> bytes:
        known = self._known.get(episode_id)
        if known is not None and _begins_with(ids, known.ids):
            tail, text = ids[len(known.ids) :], known.text
        else:
            tail, text = ids, b""
        if len(tail):
            if np.maximum.reduce(tail.view(np.uint32)) >= self.vocab_size:  # a negative one is the largest
                at = int(np.flatnonzero(tail.view(np.uint32) >= self.vocab_size)[0])
                raise BackendError(
                    f"token {len(ids) - len(tail) + at} of the prompt is id {int(tail[at])}; the model's vocabulary is "
                    f"[0, {self.vocab_size}), and such an id would end the server",
                    kind="bad_prompt",
                )
            new = msgspec.json.encode(tail.tolist())[1:-1]
            text = b"%b,%b" % (text, new) if text else new
        self._remember(episode_id, _Known(ids.copy() if ids.flags.writeable else ids, text))
        return text

    def _remember(self, episode_id: str, known: _Known) -> None:
        self._drop(episode_id)
        self._known[episode_id] = known
        self._used += known.ids.nbytes + len(known.text)
        while self._used > self._memory and len(self._known) > 1:
            self._drop(next(iter(self._known)))

    def _sampling_text(self, request: GenerateRequest, sampled: int) -> bytes:
        """All sampling parameters except length and seed, as JSON without the braces; encoded once per spec."""
        if sampled and request.sampling.min_new_tokens:
            left = max(0, request.sampling.min_new_tokens - sampled)
            return _dump(request.sampling.model_copy(update={"min_new_tokens": left}), request)
        key = (id(request.sampling), tuple(request.stop_token_ids), tuple(request.banned_token_ids))
        found = self._sampling.get(key)
        if found is None:
            if len(self._sampling) >= 64:
                self._sampling.clear()
            # the object is kept with its text, so that its id cannot be reused
            found = self._sampling[key] = (request.sampling, _dump(request.sampling, request))
        return found[1]


def _begins_with(ids: np.ndarray, known: np.ndarray) -> bool:
    """Whether a prompt begins with ids that were sent before."""
    return len(ids) >= len(known) and ids[: len(known)].tobytes() == known.tobytes()  # as bytes: a fifth of the cost


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are set, by SGLang's names; what is left out is SGLang's default. Without the length."""
    fields = sampling.model_dump(exclude_none=True, exclude={"max_new_tokens"})
    return {name: value for name, value in fields.items() if value not in ([], {})}


def _dump(sampling: SamplingParams, request: GenerateRequest) -> bytes:
    fields = sampling_fields(sampling)
    if request.stop_token_ids:
        fields["stop_token_ids"] = list(request.stop_token_ids)
    if request.banned_token_ids:
        fields["logit_bias"] = {
            **fields.get("logit_bias", {}),
            **{str(token): BANNED for token in request.banned_token_ids},
        }
    return msgspec.json.encode(fields)[1:-1]
