"""Samples with AReaL's inference engine: a backend over `InferenceEngine.agenerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import BackendError
from engine.plugins.servers.pool import Server
from engine.plugins.sglang.checks import ask_worker
from engine.plugins.sglang.sample_prompt import check_images, refuse_family, sample_prompt
from engine.plugins.trainers.backend import TrainerBackend, TrainerReply, given
from engine.plugins.trainers.pixels import check_times

if TYPE_CHECKING:
    from engine.plugins.trainers.rollouts import TrainerRollouts
    from engine.schemas.generation import GenerateRequest

_BOTH = ("temperature", "top_p", "top_k", "ignore_eos", "skip_special_tokens")
_SGLANG = (*_BOTH, "stop", "frequency_penalty")


def names_of(server: str) -> dict[str, str]:
    """The parameters of `sampling` that AReaL sends to `sglang`, or to any server, and their names there."""
    return {name: name for name in (_SGLANG if server == "sglang" else _BOTH)}


class ArealBackend(TrainerBackend):
    """AReaL's inference engine as a backend. It tells the weight version of each token, also if an update interrupts a
    reply.

    Args:
        engine: AReaL's `InferenceEngine`.
        rollouts: The episodes of the spec.
    """

    def __init__(self, engine: Any, rollouts: TrainerRollouts) -> None:
        super().__init__("AReaL", type(rollouts.spec.backend), context=rollouts.context)
        self._engine, self._format, self.pixels = engine, rollouts.format, rollouts.pixels

    async def start(self) -> None:
        """Check that AReaL's servers take the ids of a prompt with an image as they are.

        Raises:
            TrainError: as `check_times`.
            BackendError: kind `unsupported_model`: images of this family cannot be sent exactly; kind `wrong_server`: a
                server tokenises such a prompt again, or makes other pixels of its image.
        """
        if self.pixels is None:
            return
        refuse_family(self.pixels.vision)
        ids, _, digest = sample_prompt(self._format)
        assert digest is not None
        check_times(self.pixels, ids, [digest])
        for address in getattr(self._engine, "_engine", self._engine).addresses:
            server = Server(f"http://{address}")
            try:
                await check_images(server, await server.json("GET", "/server_info"), self._format, ask_worker)
            except BackendError as error:
                raise BackendError(
                    f"{error}. AReaL's servers need SGLang 0.5.23 or newer for images: 0.5.10.post1, which AReaL 1.0.4 "
                    "requires, decodes the ids of a prompt with an image and tokenises the text again",
                    kind=error.kind,
                ) from None
            finally:
                await server.http.close()

    async def sample(self, request: GenerateRequest) -> TrainerReply:
        """See `TrainerBackend.sample`. Requests of one episode have one `rid`, so AReaL sends them to one server."""
        from areal.api import ModelRequest
        from areal.api.cli_args import GenerationHyperparameters

        ids, images = request.input_ids.tolist(), []
        if request.images and self.pixels is not None:
            vision = self.pixels.vision
            ids = vision.compact(request.input_ids, request.image_spans).tolist()
            images = [vision.bank.scaled_uri(part.image).partition(",")[2] for part in request.images]
        settings = given(request.sampling, names_of("sglang")) | {
            "n_samples": 1,
            "max_new_tokens": request.max_new_tokens,
            "max_tokens": len(ids) + request.max_new_tokens,
            "stop_token_ids": sorted(set(request.stop_token_ids)),
            "greedy": request.sampling.temperature == 0,
        }
        if settings.get("top_k") == -1:
            del settings["top_k"]  # AReaL's default is the whole vocabulary
        gconfig = GenerationHyperparameters(**settings)
        reply = await self._engine.agenerate(
            ModelRequest(rid=request.episode_id, input_ids=ids, gconfig=gconfig, image_data=images)
        )
        return TrainerReply(
            reply.output_tokens, reply.output_logprobs, reply.output_versions, reply.stop_reason == "length"
        )
