"""The local backend for vision-language models: transformers' own forward pass, one sequence at a time.

The keys and values of an episode's turns are cached, so a turn computes only its new tokens and images. Positions come
from the model's own code (`get_rope_index` for three-dimensional positions).

Invariant: the features of an image enter the pass at exactly its placeholders; an image is never split between passes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.local.common import LocalModelBackend
from engine.backends.stops import StopStrings, finish_reason
from engine.errors import BackendError
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, VersionSpan

if TYPE_CHECKING:
    import torch

    from engine.schemas.backend import LocalBackendSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat
    from engine.tokens.vision import Vision


class VisionBackend(LocalModelBackend):
    """A model with a vision tower in this process. It samples one request at a time."""

    def __init__(self, *args: Any, vision: Vision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vision = vision
        self._model: VisionModel | None = None
        self._thread: ThreadPoolExecutor | None = None

    @classmethod
    def open(cls, spec: LocalBackendSpec, format: ChatFormat, loaded: LoadedSpec) -> VisionBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The spec's sampling sets a parameter that this backend does not have.
        """
        assert format.vision is not None
        return cls(**cls._arguments(spec, format, loaded), vision=format.vision)

    async def start(self) -> None:
        """Load the model. Later calls do nothing.

        Raises:
            BackendError: torch does not have the device, or transformers does not have the model.
        """
        if self._model is not None:
            return
        folder = await asyncio.to_thread(self._folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-vision")
        self._model = await self._in_thread(lambda: VisionModel(folder, self._spec, self._vision))
        self.context = min((value for value in (self.context, self._model.context) if value), default=None)
        self._vocab = min(self._vocab or self._model.vocab, self._model.vocab)

    async def _in_thread(self, work: Any) -> Any:
        if self._thread is None:
            raise BackendError("the local backend has not been started: await `start()` first", kind="not_started")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            raise BackendError("the local backend was closed", kind="closed") from None

    def _rows(self) -> int:
        if self._model is None:
            raise BackendError("the local backend has not been started: await `start()` first", kind="not_started")
        return self._model.vocab

    def _check_images(self, request: GenerateRequest) -> None:
        if len(request.images) != len(request.image_spans):
            raise BackendError("the number of images differs from the number of `image_spans`", kind="bad_request")

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Backend.generate`."""
        rows, most = self._rows(), self._check(request)
        model = self._model
        assert model is not None
        assert self._vocab is not None
        vocab = min(self._vocab, rows)
        queued, cancelled = time.perf_counter(), threading.Event()
        try:
            generation: Generation = await self._in_thread(
                lambda: model.reply(
                    request, most, vocab, StopStrings(self._decode, request.sampling.stop), queued, cancelled
                )
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return generation

    def release(self, episode_id: str) -> None:
        """Free what is cached for an episode that has ended."""
        if self._model is not None and self._thread is not None:
            self._model.forget(episode_id)

    async def update_weights(self, weights: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """See `LocalModelBackend.update_weights`; a running reply is finished first.

        A weight has the shape of the parameter that it replaces.
        """
        from engine.backends.local.load import read_weights

        self._rows()
        model = self._model
        assert model is not None
        state = await asyncio.to_thread(read_weights, weights) if isinstance(weights, Path) else dict(weights)
        await self._in_thread(lambda: model.load_weights(state, version))

    async def close(self) -> None:
        """End the thread. Waiting requests raise `BackendError`."""
        if self._thread is not None:
            if self._model is not None:
                self._model.closing.set()
            await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)

    def stats(self) -> dict[str, Any]:
        """Counts since the start."""
        if self._model is None:
            return {}
        return {
            "device": str(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "deterministic": self._spec.deterministic,
            **{name: self._model.counts[name] for name in ("requests", "cancelled", "tokens", "images_computed")},
            "prompt_tokens_computed": self._model.counts["computed"],
            "prompt_tokens_cached": self._model.counts["cached"],
            "weights_version": self._model.version,
        }


class _CachedSequence:
    """The keys and values of an episode's tokens `ids`."""

    __slots__ = ("cache", "ids")

    def __init__(self, ids: np.ndarray, cache: Any) -> None:
        self.ids = ids
        self.cache = cache


class VisionModel:
    """A model of transformers with a vision tower. Use it in one thread only; `forget` may be called from any thread."""

    def __init__(self, folder: Path, spec: LocalBackendSpec, vision: Vision) -> None:
        """Load the model.

        Raises:
            BackendError: Kind `unsupported_model`: transformers has no such model.
        """
        import torch
        from transformers import AutoModelForImageTextToText

        from engine.backends.local.device import pick_device
        from engine.backends.local.load import pick_dtype
        from engine.tokens.catalogue import no_bars

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.device = pick_device(spec.device, "backend.device")
        self.dtype = pick_dtype(spec.dtype, self.device)
        self.vision = vision
        try:
            with no_bars():
                self.model: Any = AutoModelForImageTextToText.from_pretrained(
                    folder, dtype=self.dtype, attn_implementation="sdpa"
                )
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise BackendError(f"{folder} is not a vision-language model: {why}", kind="unsupported_model") from error
        self.model.to(self.device).eval()
        text = self.model.config.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        self.vocab: int = int(self.model.get_output_embeddings().weight.shape[0])
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.closing = threading.Event()
        self._max_cached = 0 if spec.deterministic else spec.max_batch  # see `_store`
        self._cached: OrderedDict[str, _CachedSequence] = OrderedDict()
        self._lock = threading.Lock()

    def forget(self, episode_id: str) -> None:
        """Drop what is cached for an episode."""
        with self._lock:
            self._cached.pop(episode_id, None)

    def load_weights(self, state: dict[str, Any], version: int) -> None:
        """Replace all weights, or none if they do not fit, and drop the cache.

        Raises:
            BackendError: Names or shapes differ from the model's.
        """
        from engine.backends.local.load import copy_weights

        copy_weights(self.model, state)
        self.version = version
        with self._lock:
            self._cached.clear()

    def positions(self, ids: np.ndarray, images: list[str]) -> torch.Tensor:
        """Position ids of a whole sequence, from the model's own code: [3, 1, tokens], or [1, tokens] if positions are scalar."""
        import torch

        tokens = torch.tensor(ids.astype(np.int64), device=self.device)[None]
        find = getattr(self.model.model, "get_rope_index", None)
        if find is None:
            return torch.arange(len(ids), device=self.device)[None]
        types = torch.tensor(self.vision.token_types([ids.tolist()]), device=self.device)
        grid = self._tensors(images).get("image_grid_thw")
        found: torch.Tensor = find(input_ids=tokens, mm_token_type_ids=types, image_grid_thw=grid)[0]
        return found

    def _tensors(self, images: list[str]) -> dict[str, torch.Tensor]:
        import torch

        found = {name: torch.from_numpy(array) for name, array in self.vision.tensors([images]).items()}
        return {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in found.items()
        }

    def _pass(self, ids: np.ndarray, positions: torch.Tensor, images: list[str], cache: Any) -> torch.Tensor:
        """Compute the logits after the last of `ids`, float32 [1, vocab], and append the keys and values to `cache`."""
        import torch

        more: dict[str, Any] = self._tensors(images)
        tokens = torch.tensor(ids.astype(np.int64), device=self.device)[None]
        if images and hasattr(self.model.model, "get_rope_index"):
            more["mm_token_type_ids"] = torch.tensor(self.vision.token_types([ids.tolist()]), device=self.device)
        out = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **more
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def reply(
        self,
        request: GenerateRequest,
        most: int,
        vocab: int,
        stops: StopStrings,
        queued: float,
        cancelled: threading.Event,
    ) -> Generation:
        """Sample one reply, token by token.

        Raises:
            BackendError: The model's logits are not a distribution (kind `bad_logits`), or its pass failed (`step_failed`).
        """
        import torch

        began = time.perf_counter()
        self.counts["requests"] += 1
        try:
            with torch.inference_mode():
                ids, logprobs, finish, cached = self._sample(request, most, vocab, stops, cancelled)
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(
                f"the model's forward pass failed: {type(error).__name__}: {error}", kind="step_failed"
            ) from error
        return Generation(
            output_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish=finish,
            versions=[VersionSpan(version=self.version, start=0, end=len(ids))] if ids else [],
            prompt_tokens=len(request.input_ids),
            cached_tokens=cached,
            seconds=time.perf_counter() - queued,
            queue_seconds=began - queued,
        )

    def _sample(
        self, request: GenerateRequest, most: int, vocab: int, stops: StopStrings, cancelled: threading.Event
    ) -> tuple[list[int], list[float], FinishReason, int]:
        import torch

        from engine.backends.local.sampler import SamplingState, sample

        prompt = request.input_ids
        cache, cached = self._cached_prefix(request)
        positions = self.positions(prompt, [image.image for image in request.images])
        new = [
            image.image
            for image, (start, _) in zip(request.images, request.image_spans, strict=True)
            if start >= cached
        ]
        logits = self._pass(prompt[cached:], positions[..., cached:], new, cache)
        self.counts.update(computed=len(prompt) - cached, cached=cached, images_computed=len(new))
        state = SamplingState(request, vocab, self.device)
        after = int(positions.max()) + 1
        ids: list[int] = []
        logprobs: list[float] = []
        while True:
            if cancelled.is_set() or self.closing.is_set():
                self.counts["cancelled"] += 1
                raise BackendError("the request was cancelled", kind="closed")
            drawn = sample(logits.clone(), [state], [len(ids)])
            token, logprob = int(drawn.ids[0]), float(drawn.logprobs[0])
            if not np.isfinite(logprob):
                raise BackendError(
                    "the model's logits are not a distribution (nan, or every token is banned)", kind="bad_logits"
                )
            ids.append(token)
            logprobs.append(logprob)
            state.count(token)
            self.counts["tokens"] += 1
            finish = finish_reason(request, ids, most, stops)
            if finish is not None:
                break
            at = torch.full((*positions.shape[:-1], 1), after + len(ids) - 1, device=self.device)
            logits = self._pass(np.array([token]), at, [], cache)
        self._store(request.episode_id, np.concatenate([prompt, np.array(ids[:-1], np.int32)]), cache)
        return ids, logprobs, finish, cached

    def _cached_prefix(self, request: GenerateRequest) -> tuple[Any, int]:
        """Return the episode's cache and its length in tokens. At least one token of the prompt is not in it."""
        from transformers import DynamicCache

        with self._lock:
            kept = self._cached.pop(request.episode_id, None)
        prompt = request.input_ids
        if kept is not None and len(kept.ids) < len(prompt) and np.array_equal(kept.ids, prompt[: len(kept.ids)]):
            return kept.cache, len(kept.ids)
        return DynamicCache(), 0

    def _store(self, episode_id: str, ids: np.ndarray, cache: Any) -> None:
        """Cache a sequence for the episode's next turn.

        With `deterministic`, nothing is cached: a pass over several tokens and passes over single tokens give different
        bits, and a restart loses the cache.
        """
        with self._lock:
            self._cached[episode_id] = _CachedSequence(ids, cache)
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
