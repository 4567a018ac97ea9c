"""The local backend: transformers in this process.

The event loop checks requests and waits for replies; a separate thread (`worker`) runs the model. torch is imported by
`start`, not by importing this module.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.backends.backend import Backend
from engine.backends.registry import refuse_parameters
from engine.backends.stops import StopStrings
from engine.errors import BackendError, ContextOverflow, TrainError
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.generation import GenerateRequest, Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from engine.plugins.local.kv import PromptImages
    from engine.plugins.local.load import BatchedModel
    from engine.plugins.local.rows import RowTable
    from engine.plugins.local.worker import SamplingWorker
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.tokens.vision import Vision
    from engine.train.policy import Policy
    from engine.train.sync import Pushed


class LocalBackend(Backend):
    """A text model in this process. `VisionBackend` is the one for models with images.

    >>> backend = LocalBackend(lambda: folder, tokenizer.decode, LocalBackendSpec(max_batch=8))
    >>> await backend.start()
    >>> generation = await backend.generate(request)
    >>> await backend.close()
    """

    declared = LocalBackendSpec

    def __init__(
        self,
        folder: Callable[[], Path],
        decode: Callable[[Sequence[int]], str],
        spec: LocalBackendSpec,
        *,
        vocab: int | None = None,
        context: int | None = None,
        prefill_tokens: int | None = None,
        stash_bytes: int | None = None,
        vision: Vision | None = None,
    ) -> None:
        """
        Args:
            folder: Returns the model's folder, and downloads it if necessary; called in `start`.
            decode: Ids to text, with special tokens; used to find stop strings.
            spec: Device, precision, batch size.
            vocab: Number of ids that may be sampled; an embedding may be padded beyond them. Default: all rows of the
                embedding.
            context: Maximum length of a sequence in tokens; default: the model's own.
            prefill_tokens: Maximum number of prompt tokens in one forward pass. Default: 512 on a CPU, 4096 on a GPU.
            stash_bytes: Maximum memory for cached sequences of episodes that have no row now. Default: an eighth of the
                free memory.
            vision: The image processing of a model with a vision tower.
        """
        self._folder = folder
        self._decode = decode
        self._spec = spec
        self._vocab = vocab
        self.context = context
        self._prefill_tokens = prefill_tokens
        self._stash_bytes = stash_bytes
        self._vision = vision
        self._marks: dict[str, int] = {}
        """A negative number for each image seen so far."""
        self._worker: SamplingWorker | None = None
        self._device: torch.device | None = None

    @classmethod
    def open(cls, spec: LocalBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> LocalBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The spec's sampling sets a parameter that this backend does not have.
        """
        from engine.tokens.catalogue import resolve_model

        refuse_parameters(spec, loaded.spec.sampling)
        model = loaded.spec.model
        contexts = [value for value in (format.context, model.context) if value]
        return cls(
            lambda: resolve_model(model.path, model.revision, loaded.base),
            format.decode,
            spec,
            vocab=format.vocab_size,
            context=min(contexts, default=None),
            vision=format.vision,
        )

    async def start(self) -> None:
        """Load the model, and check that batching is exact for its architecture. Later calls do nothing.

        Raises:
            EngineError: torch does not have `backend.device`.
            BackendError: this backend cannot run the model.
        """
        if self._worker is not None:
            return
        folder = await asyncio.to_thread(self._folder)
        if "torch" not in sys.modules:  # idle threads of OpenMP that wait busily would take the event loop's core
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from engine.plugins.local.worker import SamplingWorker

        ready: Future[None] = Future()
        worker = SamplingWorker(lambda: self._load(folder), self._prefill_tokens)
        worker.start(ready)
        try:
            await asyncio.wrap_future(ready)
        except asyncio.CancelledError:
            worker.end()
            raise
        self.context = min((value for value in (self.context, worker.packed.context) if value), default=None)
        self._vocab = min(self._vocab or worker.packed.vocab, worker.packed.vocab)
        self._device = worker.packed.device
        self._worker = worker

    def _load(self, folder: Path) -> tuple[BatchedModel, RowTable]:
        """Load the model; called in the worker's thread, because torch has one thread count per thread."""
        import torch

        from engine.backends.device import pick_device
        from engine.plugins.local import load
        from engine.plugins.local.rows import RowTable

        spec = self._spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        device = pick_device(spec.device, "backend.device")
        dtype, rows = load.pick_dtype(spec.dtype, device), spec.max_batch
        keys = {"repeatable": spec.deterministic, "experts": spec.routed_experts}
        packed: BatchedModel
        if self._vision is None:
            packed = load.BatchedModel(folder, device, dtype, rows, **keys)
        else:
            from engine.plugins.local.vision import VisionModel

            packed = VisionModel(folder, device, dtype, rows, vision=self._vision, **keys)
        budget = load.stash_budget(device) if self._stash_bytes is None else self._stash_bytes
        return packed, RowTable(packed.store, rows, budget, reuse=packed.reuses_prefixes)

    def _images(self, request: GenerateRequest) -> PromptImages | None:
        """Check the images of a request, and mark their tokens. None without images.

        Raises:
            BackendError: The model cannot take them.
        """
        if self._vision is None:
            if request.images:
                raise BackendError(
                    "this model does not take images: use a vision-language model", kind="unsupported_parameter"
                )
            return None
        from engine.plugins.local.vision import place_images

        if len(request.images) != len(request.image_spans):
            raise BackendError("the number of images differs from the number of `image_spans`", kind="bad_request")
        return place_images(
            self._vision,
            request.input_ids,
            [image.image for image in request.images],
            request.image_spans,
            self._marks,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply.

        Raises:
            ContextOverflow: Not one token fits after the prompt.
            BackendError: Kinds `not_started`, `closed`, `bad_request`, `unsupported_parameter`, `bad_logits`,
                `step_failed`.
        """
        from engine.plugins.local.rows import PendingReply
        from engine.plugins.local.sampler import SamplingState

        worker = self._started()
        refuse_parameters(self._spec, request.sampling)
        images = self._images(request)
        most = tokens_to_sample(request, rows=worker.packed.vocab, context=self.context)
        assert self._vocab is not None
        assert self._device is not None
        pending = PendingReply(
            request=request,
            future=Future(),
            sampling=SamplingState(request, self._vocab, self._device),
            stops=StopStrings(self._decode, request.sampling.stop),
            most=most,
            images=images,
        )
        worker.submit(pending)
        try:
            return await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            pending.cancelled = True
            worker.wake()
            raise

    def _started(self) -> SamplingWorker:
        if self._worker is None:
            raise BackendError("the local backend has not been started: await `start()` first", kind="not_started")
        return self._worker

    def release(self, episode_id: str) -> None:
        """Free what is cached for an episode that has ended."""
        if self._worker is None:
            return
        table = self._worker.table
        with suppress(BackendError):  # the backend is closed, so nothing is cached
            self._worker.call(lambda: table.release(episode_id))

    async def update_weights(self, weights: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Sample with new weights from the next token on.

        The cache is dropped. Running replies continue after their last token, and their context is computed again with
        the new weights; their earlier tokens keep the version that sampled them.

        A weight has the shape of the parameter that it replaces.

        Args:
            weights: Every parameter by name, or a folder of safetensors.
            version: The weight version of tokens sampled from now on, for `VersionSpan`.

        Raises:
            BackendError: Names or shapes differ from the model's. The old weights then stay.
        """
        from engine.plugins.local.load import copy_weights, read_weights

        worker = self._started()
        state = await asyncio.to_thread(read_weights, weights) if isinstance(weights, Path) else dict(weights)

        def swap() -> None:
            copy_weights(worker.packed.model, state)
            worker.table.clear()
            worker.version = version

        await worker.call(swap)

    async def close(self) -> None:
        """End the thread and free the model. Requests in flight raise `BackendError`."""
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start."""
        if self._worker is None:
            return {}
        worker = self._worker
        counts = worker.counts
        steps = counts["steps"]
        return {
            "device": str(worker.packed.device),
            "dtype": str(worker.packed.dtype).removeprefix("torch."),
            "deterministic": worker.packed.repeatable,
            "requests": counts["requests"],
            "cancelled": counts["cancelled"],
            "tokens": counts["tokens"],
            "prompt_tokens_computed": counts["prompt_tokens"],
            "prompt_tokens_cached": worker.table.counts["cached_tokens"],
            "steps": steps,
            "tokens_per_step": round(counts["row_steps"] / steps, 2) if steps else 0.0,
            "forward_seconds": round(worker.seconds["forward"], 3),
            "sample_seconds": round(worker.seconds["sample"], 3),
            **({} if self._vision is None else {"images_computed": worker.packed.images_computed}),
            "cache_bytes": worker.packed.store.bytes,
            "stash_bytes": worker.table.stashed_bytes,
            "stashed": worker.table.counts["stashed"],
            "evicted": worker.table.counts["evicted"],
            "weights_version": worker.version,
        }


def tokens_to_sample(request: GenerateRequest, *, rows: int, context: int | None) -> int:
    """Check a request. Returns the maximum number of tokens to sample.

    Args:
        request: The request.
        rows: Number of rows of the embedding; token ids are below it.
        context: Maximum length of a sequence in tokens.

    Raises:
        ContextOverflow: Not one token fits after the prompt.
        BackendError: Kind `bad_request` or `unsupported_parameter`.
    """
    if request.adapter is not None:
        raise BackendError(
            "the local backend does not support adapters: merge the adapter into the model",
            kind="unsupported_parameter",
        )
    ids = request.input_ids
    if not len(ids):
        raise BackendError("the prompt is empty: send at least one token", kind="bad_request")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise BackendError(f"the prompt has ids outside the model's vocabulary [0, {rows})", kind="bad_request")
    for name, wrong in (
        ("logit_bias", [int(token) for token in request.sampling.logit_bias or {}]),
        ("banned_token_ids", request.banned_token_ids),
    ):
        if bad := [token for token in wrong if not 0 <= token < rows]:
            raise BackendError(
                f"`{name}` has id {bad[0]}, outside the model's vocabulary [0, {rows})", kind="bad_request"
            )
    most = min(request.max_new_tokens, request.sampling.max_new_tokens or request.max_new_tokens)
    if context is None:
        return most
    if len(ids) + 1 > context:
        raise ContextOverflow(f"the prompt has {len(ids)} tokens, and the model's context is {context} tokens")
    return min(most, context - len(ids))


class LocalSync:
    """Copies weights into the model of the local backend between two of its steps, in the precision of that model."""

    def __init__(self, spec: EpisodeSpec, backend: LocalBackend, folder: Path, *, lora: bool) -> None:
        """See `open_sync`."""
        self._backend = backend

    async def push(self, policy: Policy, version: int) -> Pushed:
        """See `WeightSync`. Running replies continue with the new weights.

        Raises:
            TrainError: kind `weights_not_taken`: the backend did not load the weights.
        """
        from engine.train.sync import Pushed, tensor_bytes

        weights = await asyncio.to_thread(policy.weights, "model")
        began = time.monotonic()
        try:
            await self._backend.update_weights(weights, version)
        except BackendError as error:
            raise TrainError(
                f"the local backend did not take version {version}: {error}", kind="weights_not_taken"
            ) from error
        taken = self._backend.stats().get("weights_version")
        if taken != version:
            raise TrainError(
                f"the local backend samples with version {taken}, but was sent version {version}",
                kind="weights_not_taken",
            )
        return Pushed(bytes=tensor_bytes(weights.values()), pause_seconds=time.monotonic() - began)
