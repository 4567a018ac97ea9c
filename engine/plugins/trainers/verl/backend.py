"""Samples with the servers of verl: a backend over verl's LLMServerClient, ids in, and ids, log-probs and weight
versions out.

Images are sent at the size of their grid, at which no processor scales. vLLM's server takes expanded ids and makes
one placeholder of each run itself; SGLang's takes one placeholder for each image.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError
from engine.plugins.sglang.routing import layout_of
from engine.plugins.trainers.backend import TrainerBackend, TrainerReply, given
from engine.plugins.trainers.library import value_of
from engine.plugins.trainers.verl.settings import SHARED
from engine.tokens.pixels import decode

if TYPE_CHECKING:
    from engine.plugins.trainers.pixels import Pixels
    from engine.plugins.trainers.rollouts import TrainerRollouts
    from engine.schemas.backend import BackendBase
    from engine.schemas.generation import GenerateRequest


class VerlBackend(TrainerBackend):
    """The servers of a verl training as a backend.

    verl reports the versions of a reply as a smallest and a largest one. If they differ, all tokens get the smallest
    one, and `collapsed_versions` of `stats` counts the reply. `client` is verl's `LLMServerClient`.
    """

    compact = False
    """Send one placeholder for each image, as SGLang's server takes it."""

    def __init__(self, client: Any, declared: type[BackendBase], *, context: int | None) -> None:
        super().__init__("verl", declared, context=context)
        self._client = client
        self._counts["collapsed_versions"] = 0

    @classmethod
    def of(cls, config: Any, client: Any, episodes: TrainerRollouts) -> VerlBackend:
        """The backend of the episodes of a spec, with verl's whole configuration and its `LLMServerClient`."""
        declared = episodes.spec.backend
        backend = cls(client, type(declared), context=context_of(config, episodes.context))
        backend.compact = value_of(config, "actor_rollout_ref.rollout.name") == "sglang"
        backend.pixels = episodes.pixels
        backend.layout = layout_of(episodes.model_folder) if declared.asks_experts else None
        return backend

    async def sample(self, request: GenerateRequest) -> TrainerReply:
        """See `TrainerBackend.sample`. Requests of one episode have one id, so verl sends them to one server.

        Raises:
            BackendError: The request was aborted (kind `aborted`, may be tried again), or the server told no version
                (kind `invalid_reply`).
        """
        ids, images = request.input_ids, {}
        if request.images and self.pixels is not None:
            images["image_data"] = await asyncio.to_thread(
                _pictures, self.pixels, [image.image for image in request.images]
            )
            if self.compact:
                ids = self.pixels.vision.compact(ids, request.image_spans)
        reply = await self._client.generate(
            request.episode_id, prompt_ids=ids.tolist(), sampling_params=sampling_params(request), **images
        )
        if reply.stop_reason in ("aborted", "abort"):
            raise BackendError("verl's server aborted the request", kind="aborted", retryable=True)
        oldest, newest = versions_of(reply.extra_fields)
        self._counts["collapsed_versions"] += oldest != newest
        count = len(reply.token_ids)
        # vLLM's server says `completed` of replies that were cut, too.
        cut = reply.stop_reason == "length" or count >= request.max_new_tokens
        cached = int(reply.extra_fields.get("num_cached_tokens") or 0)
        return TrainerReply(reply.token_ids, reply.log_probs, [oldest] * count, cut, cached, reply.routed_experts)


def _pictures(pixels: Pixels, digests: list[str]) -> list[Any]:
    """Images as verl's servers take them: `PIL.Image` at the size of the grid."""
    return [decode(b64decode(pixels.vision.bank.scaled_uri(digest).partition(",")[2])) for digest in digests]


def context_of(config: Any, own: int | None) -> int | None:
    """The longest sequence in tokens that spec and model (`own`) and servers allow; SGLang's keep one token free."""
    servers = value_of(config, "actor_rollout_ref.rollout.max_model_len")
    return min((limit for limit in (own, servers and servers - 1) if limit), default=None)


def versions_of(extra_fields: dict[str, Any]) -> tuple[int, int]:
    """The smallest and the largest weight version of a reply.

    Raises:
        BackendError: kind `invalid_reply`: the server did not tell them.
    """
    single = extra_fields.get("global_steps")
    oldest, newest = (extra_fields.get(name, single) for name in ("min_global_steps", "max_global_steps"))
    if oldest is None or newest is None:
        raise BackendError("verl's server gave no weight version (`global_steps`)", kind="invalid_reply")
    return int(oldest), int(newest)


def sampling_params(request: GenerateRequest) -> dict[str, Any]:
    """A request's sampling parameters under the names that both kinds of servers take."""
    return given(request.sampling, {name: name for name in SHARED}) | {
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": sorted(set(request.stop_token_ids)),
        "logprobs": True,
    }
