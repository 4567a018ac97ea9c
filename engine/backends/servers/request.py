"""A generation request -> the body that a server takes, in which only the new ids of the prompt are encoded.

A prompt grows from turn to turn, so the JSON text of its ids is kept and only the new ids are encoded: the cost of a turn does
not depend on its length.

Invariant: the text that is sent holds exactly `input_ids`, and all of them lie in the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.tokens.experts import ExpertLayout

_META_BYTES = 1 << 20
_TOKEN_BYTES = 1024
_CHOICE_BYTES = 6
"""Bytes of one choice of an expert in base64: at most 5.4, of an int32."""


class EncodedRequest(msgspec.Struct, frozen=True):
    """The body of one request."""

    pieces: tuple[bytes, ...]
    rid: str
    prompt: bytes
    """The prompt's ids as JSON, without the brackets; the server must echo them."""
    ids: np.ndarray
    """The same as int32 [tokens]. What is sent instead, where there are images, holds one placeholder for each."""
    max_new_tokens: int
    experts_from: int | None = None
    """The experts of the tokens from this one on are requested; None: none are."""
    layout: ExpertLayout | None = None
    """With `experts_from`: the sizes that they must have."""

    @property
    def most(self) -> int:
        """Bytes that a reply may have: the prompt's ids, the sampled tokens with id, log-prob and text, experts, and the rest."""
        plain = _META_BYTES + 2 * len(self.prompt) + _TOKEN_BYTES * self.max_new_tokens
        if self.experts_from is None or self.layout is None:
            return plain
        tokens = len(self.ids) + self.max_new_tokens - self.experts_from
        return plain + _CHOICE_BYTES * self.layout.layers * self.layout.top_k * tokens


class _Known(msgspec.Struct, frozen=True):
    ids: np.ndarray
    """Of a prompt that was sent: the tape's own where they are read-only, since what is on a tape is never changed."""
    text: bytes
    """Their JSON, without the brackets."""


class PromptEncoder(ABC):
    """Encodes requests. It keeps the prompts of the newest episodes, up to `memory` bytes."""

    def __init__(self, *, vocab_size: int, memory: int = 256 << 20) -> None:
        """
        Args:
            vocab_size: Ids must be below it: a larger id would end some servers.
            memory: Maximum size of the kept prompts in bytes; dropped prompts are encoded again.
        """
        self.vocab_size = vocab_size
        self._memory = memory
        self._used = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._sampling: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[SamplingParams, bytes]] = {}

    @abstractmethod
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

    @abstractmethod
    def dump(self, sampling: SamplingParams, request: GenerateRequest) -> bytes:
        """The sampling parameters and the request's stop and banned ids, as JSON without the braces."""

    def forget(self, episode_id: str) -> None:
        """Drop the prompt of an episode that has ended."""
        self._drop(episode_id)

    def _drop(self, key: str) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._used -= known.ids.nbytes + len(known.text)

    def _prompt(self, episode_id: str, ids: np.ndarray) -> bytes:
        tail, text = ids, b""
        if (before := self._known.get(episode_id)) is not None:
            size = before.ids.size
            if before.ids.tobytes() == ids[:size].tobytes():  # as bytes: a fifth of the cost
                tail, text = ids[size:], before.text
        if tail.size:
            if np.maximum.reduce(tail.view(np.uint32)) >= self.vocab_size:  # a negative one is the largest
                at = int(np.flatnonzero(tail.view(np.uint32) >= self.vocab_size)[0])
                raise BackendError(
                    f"token {len(ids) - len(tail) + at} of the prompt is id {int(tail[at])}; the model's vocabulary is "
                    f"[0, {self.vocab_size}), and such an id can end the server",
                    kind="bad_prompt",
                )
            new = msgspec.json.encode(tail.tolist())[1:-1]
            text = b"%b,%b" % (text, new) if text else new
        self._remember(episode_id, _Known(ids.copy() if ids.flags.writeable else ids, text))
        return text

    def _remember(self, episode_id: str, known: _Known) -> None:
        if (before := self._known.pop(episode_id, None)) is not None:
            self._used -= before.ids.nbytes + len(before.text)
        self._known[episode_id] = known
        self._used += known.ids.nbytes + len(known.text)
        while self._used > self._memory and len(self._known) > 1:
            self._drop(next(iter(self._known)))

    def _sampling_text(self, request: GenerateRequest, sampled: int) -> bytes:
        """All sampling parameters except length and seed, as JSON without the braces; encoded once per spec."""
        if sampled and request.sampling.min_new_tokens:
            left = max(0, request.sampling.min_new_tokens - sampled)
            return self.dump(request.sampling.model_copy(update={"min_new_tokens": left}), request)
        key = (id(request.sampling), tuple(request.stop_token_ids), tuple(request.banned_token_ids))
        found = self._sampling.get(key)
        if found is None:
            if len(self._sampling) >= 64:
                self._sampling.clear()
            # the object is kept with its text, so that its id cannot be reused
            found = self._sampling[key] = (request.sampling, self.dump(request.sampling, request))
        return found[1]
