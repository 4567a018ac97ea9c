"""Samples with SkyRL's inference engines: a backend over its `InferenceEngineInterface`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import BackendError
from engine.plugins.sglang.sample_prompt import refuse_family
from engine.plugins.trainers.backend import TrainerBackend, TrainerReply, given
from engine.plugins.trainers.pixels import check_times
from engine.tokens.image_bank import RecentlyUsed

if TYPE_CHECKING:
    from engine.schemas.backend import BackendBase
    from engine.schemas.generation import GenerateRequest

NAMES = {
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "stop", "ignore_eos",
            "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
        )
    },
    "min_new_tokens": "min_tokens",
}  # fmt: skip
"""The parameters of `sampling` that SkyRL's vLLM servers take, and their names there."""

_KEPT = 80_000
"""Placeholders of the images whose encodings are kept: 1 GB."""
_ROUNDING = 0.02
"""Largest difference of normalised pixels that is rounding to bfloat16: about one grey level."""


class SkyRLBackend(TrainerBackend):
    """SkyRL's inference engines as a backend. SkyRL tells no weight versions: all tokens have that of `version`.

    Args:
        client: SkyRL's inference engine client.
        declared: The config class of the spec's backend, for its capabilities.
        context: Maximum length of a sequence in tokens.
        model: The name by which SkyRL's servers know the policy; None: the client's own.
    """

    def __init__(self, client: Any, declared: type[BackendBase], *, context: int | None, model: str | None) -> None:
        super().__init__("SkyRL", declared, context=context)
        self._client = client
        self._model = model
        self._encoded: RecentlyUsed[asyncio.Task[tuple[str, str]]] = RecentlyUsed(_KEPT)
        self._compared = False
        self._released: set[asyncio.Task[None]] = set()
        self.version = 0
        """The version of the weights that the servers have now; the generator sets it."""

    async def start(self) -> None:
        """Raise BackendError of kind `unsupported_model` if images of this family cannot be sent exactly."""
        if self.pixels is not None:
            refuse_family(self.pixels.vision)

    async def sample(self, request: GenerateRequest) -> TrainerReply:
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
        reply = await self._client.generate(batch, model=self._model)
        ids, logprobs = reply["response_ids"][0], reply["response_logprobs"]
        (experts,) = reply.get("rollout_expert_indices") or [None]
        return TrainerReply(
            ids,
            None if logprobs is None else logprobs[0],
            [self.version] * len(ids),
            reply["stop_reasons"][0] == "length",
            experts=None if experts is None else np.asarray(experts),
        )

    async def _features(self, request: GenerateRequest) -> dict[str, Any]:
        """SkyRL's `MultiModalFeatures` of a prompt: its images as vLLM takes them, and where their places are."""
        assert self.pixels is not None
        bank, tasks = self.pixels.vision.bank, []
        try:
            for part in request.images:
                task = self._encoded.get(part.image)
                if task is None:  # an image is encoded once while its encoding is kept
                    task = asyncio.create_task(self._encode(part.image))
                    self._encoded.put(part.image, task, bank.picture(part.image).placeholders)
                tasks.append(asyncio.shield(task))
            encoded = await asyncio.gather(*tasks)
        except Exception:
            self._encoded = RecentlyUsed(_KEPT)  # the image is tried again
            raise
        hashes, data = zip(*encoded, strict=True)
        places = [{"offset": start, "length": end - start} for start, end in request.image_spans]
        return {
            "mm_hashes": {"image": list(hashes)},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": list(data)},
        }

    async def _encode(self, digest: str) -> tuple[str, str]:
        """Let a server of SkyRL process an image at the size of its grid, which it does not scale: its hash and data.

        Raises:
            TrainError: as `check_times`.
            BackendError: kind `wrong_server`: the server makes other placeholders of it, or other pixels of the first
                one, than the rows have.
        """
        assert self.pixels is not None
        bank = self.pixels.vision.bank
        picture = bank.picture(digest)
        check_times(self.pixels, [0, *picture.ids.tolist()], [digest])
        part = {"type": "image_url", "image_url": {"url": bank.scaled_uri(digest)}}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
        if self._model is not None:
            body["model"] = self._model
        features = (await self._client.render_chat_completion({"json": body})).get("features") or {}
        try:
            length = features["mm_placeholders"]["image"][0]["length"]
            name, data = features["mm_hashes"]["image"][0], features["kwargs_data"]["image"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise BackendError(f"SkyRL's server does not encode an image: {error!r}", kind="wrong_server") from None
        if length != picture.placeholders:
            raise BackendError(
                f"SkyRL's server expands an image to {length} placeholders, and the model's own processor to "
                f"{picture.placeholders}: its pixel limits differ (`generator.inference_engine.engine_init_kwargs`, "
                "preprocessor_config.json)",
                kind="wrong_server",
            )
        if not self._compared:
            from skyrl.backends.renderer import decode_mm_kwargs

            there = decode_mm_kwargs({"image": [data]})["pixel_values"]
            here = torch.from_numpy(bank.tensors(digest)["pixel_values"])
            if there is None or there.shape != here.shape or float((there.float() - here).abs().max()) > _ROUNDING:
                raise BackendError(
                    "SkyRL's server makes other pixels of an image than the rows have: its preprocessor_config.json "
                    "differs from that of the spec's model",
                    kind="wrong_server",
                )
            self._compared = True
        return name, data

    def release(self, episode_id: str) -> None:
        """Tell SkyRL's router that an episode has ended, so that it frees the place of its session."""
        task = asyncio.get_running_loop().create_task(self._client.finish_session(episode_id))
        self._released.add(task)
        task.add_done_callback(self._released.discard)

    async def close(self) -> None:
        """Wait until the router has received the end of every finished episode."""
        await asyncio.gather(*self._released)
