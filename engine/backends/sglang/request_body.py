"""A generation request -> the body of a request to /generate."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.backends.servers.request import EncodedRequest, PromptEncoder
from engine.errors import BackendError
from engine.schemas.generation import GenerateRequest, SamplingParams

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
