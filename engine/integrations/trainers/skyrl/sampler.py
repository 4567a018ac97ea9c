"""Samples with SkyRL's inference engines: a backend over its `InferenceEngineInterface`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.backends.sglang.images import refuse_family
from engine.errors import BackendError
from engine.integrations.trainers.pixels import check_times
from engine.integrations.trainers.sampler import Sampled, TrainerBackend, given

if TYPE_CHECKING:
    from engine.integrations.trainers.pixels import Pixels
    from engine.schemas.backend_base import BackendBase
    from engine.schemas.generation import GenerateRequest

NAMES = {
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "ignore_eos",
            "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
        )
    },
    "min_new_tokens": "min_tokens",
}  # fmt: skip
"""The parameters of `sampling` that SkyRL's vLLM servers take, and their names there."""


_MOST_BYTES = 1 << 30
"""Encoded images that are kept, in bytes; then all are encoded again."""
_ROUNDING = 0.02
"""Largest difference of normalised pixels that is rounding to bfloat16: about one grey level."""


class SkyRLBackend(TrainerBackend):
    """SkyRL's inference engines as a backend. SkyRL tells no weight versions: all tokens have that of `version`.

    Args:
        client: SkyRL's inference engine client.
        declared: The config class of the spec's backend, for its capabilities.
        context: Maximum length of a sequence in tokens.
        model: The name by which SkyRL's servers know the policy; None: the client's own.
        pixels: What makes the images, for a model that takes images.
    """

    def __init__(
        self,
        client: Any,
        declared: type[BackendBase],
        *,
        context: int | None,
        model: str | None,
        pixels: Pixels | None = None,
    ) -> None:
        super().__init__("SkyRL", declared, context=context)
        self._client = client
        self._model = model
        self.pixels = pixels
        self._encoded: dict[str, asyncio.Task[tuple[str, str]]] = {}
        """Images as vLLM takes them, by digest."""
        self._bytes = 0
        self._compared = False
        self._released: set[asyncio.Task[None]] = set()
        self.version = 0
        """The version of the weights that the servers have now; the generator sets it."""

    async def sample(self, request: GenerateRequest) -> Sampled:
        """See `TrainerBackend.sample`."""
        params = given(request.sampling, NAMES) | {
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(set(request.stop_token_ids)),
            "include_stop_str_in_output": True,
            "seed": request.seed,
            "logprobs": 1,
        }
        batch: dict[str, Any] = {
            "prompts": None,
            "prompt_token_ids": [request.input_ids.tolist()],
            "sampling_params": params,
            "session_ids": [request.episode_id],
        }
        if request.images:
            batch["mm_features"] = [await self._features(request)]
        found = await self._client.generate(batch, model=self._model)
        ids, logprobs = found["response_ids"][0], found["response_logprobs"]
        (experts,) = found.get("rollout_expert_indices") or [None]
        return Sampled(
            ids,
            None if logprobs is None else logprobs[0],
            [self.version] * len(ids),
            found["stop_reasons"][0] == "length",
            experts=None if experts is None else np.asarray(experts),
        )

    async def _features(self, request: GenerateRequest) -> dict[str, Any]:
        """SkyRL's `MultiModalFeatures` of a prompt: its images as vLLM takes them, and where their placeholders are.

        Raises:
            BackendError: kind `unsupported_model`: images of this family cannot be sent exactly; or as `_encode`.
        """
        assert self.pixels is not None
        refuse_family(self.pixels.vision)
        encoded = await asyncio.gather(*[asyncio.shield(self._encoding(part.image)) for part in request.images])
        hashes, data = zip(*encoded, strict=True)
        places = [{"offset": start, "length": end - start} for start, end in request.image_spans]
        return {
            "mm_hashes": {"image": list(hashes)},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": list(data)},
        }

    def _encoding(self, digest: str) -> asyncio.Task[tuple[str, str]]:
        """The hash and the data of an image; each image is encoded once while it is kept."""
        if self._bytes > _MOST_BYTES:
            self._encoded, self._bytes = {}, 0
        task = self._encoded.get(digest)
        if task is None or (task.done() and task.exception() is not None):
            task = self._encoded[digest] = asyncio.get_running_loop().create_task(self._encode(digest))
        return task

    async def _encode(self, digest: str) -> tuple[str, str]:
        """Let a server of SkyRL process an image at the size of its grid, which it does not scale.

        Raises:
            BackendError: kind `wrong_server`: the server makes other placeholders or pixels of it than the rows have.
        """
        assert self.pixels is not None
        vision = self.pixels.vision
        part = {"type": "image_url", "image_url": {"url": vision.bank.scaled_uri(digest)}}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
        if self._model is not None:
            body["model"] = self._model
        features = (await self._client.render_chat_completion({"json": body})).get("features") or {}
        try:
            length = features["mm_placeholders"]["image"][0]["length"]
            name, data = features["mm_hashes"]["image"][0], features["kwargs_data"]["image"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise BackendError(f"SkyRL's server does not encode an image: {error!r}", kind="wrong_server") from None
        wanted = vision.bank.picture(digest).placeholders
        if length != wanted:
            raise BackendError(
                f"SkyRL's server expands an image to {length} placeholders, and the model's own processor to {wanted}: its pixel "
                "limits differ (`generator.inference_engine.engine_init_kwargs`, preprocessor_config.json)",
                kind="wrong_server",
            )
        if not self._compared:
            self._compare(digest, data)
            self._compared = True
        self._bytes += len(data)
        return name, data

    def _compare(self, digest: str, data: str) -> None:
        """Compare the first image's pixels with those of the rows, rounded as the server's are."""
        from skyrl.backends.renderer import decode_mm_kwargs

        assert self.pixels is not None
        bank = self.pixels.vision.bank
        check_times(self.pixels, [0, *bank.picture(digest).ids.tolist()], [digest])
        there = decode_mm_kwargs({"image": [data]})["pixel_values"]
        here = torch.from_numpy(bank.tensors(digest)["pixel_values"])
        if there is None or there.shape != here.shape or float((there.float() - here).abs().max()) > _ROUNDING:
            raise BackendError(
                "SkyRL's server makes other pixels of an image than the rows have: its preprocessor_config.json differs from that "
                "of the spec's model",
                kind="wrong_server",
            )

    def release(self, episode_id: str) -> None:
        """Tell SkyRL's router that an episode has ended, so that it frees the place of its session."""
        task = asyncio.get_running_loop().create_task(self._client.finish_session(episode_id))
        self._released.add(task)
        task.add_done_callback(self._released.discard)

    async def close(self) -> None:
        """Wait until the router has received the end of every finished episode."""
        await asyncio.gather(*self._released)
