"""Samples with the weights of a trainer in this process: the engine's local sampler over the trainer's own model.

No weight is copied. The trainer and the sampler use the model in turn: `lent` switches it to the sampler's attention
and to evaluation mode, and switches back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.kv import ATTENTION
from engine.plugins.local.load import BatchedModel, stash_budget
from engine.plugins.local.rows import RowTable
from engine.plugins.local.vision import VisionModel

if TYPE_CHECKING:
    from engine.plugins.local.spec import LocalBackendSpec
    from engine.tokens.vision import Vision


class _SharedModel(BatchedModel):
    """A model that the trainer has loaded."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._given = model
        super().__init__(*args, **kwargs)

    def _open(self, folder: Path) -> Any:
        return self._given


class _SharedVisionModel(_SharedModel, VisionModel):
    """The same with a vision tower."""


class SharedBackend(LocalBackend):
    """The local backend over a model that a trainer updates in place.

    Requests are valid only inside `lent`, and after `weights_changed` if the weights have changed since the last one.
    """

    def __init__(
        self,
        model: Any,
        folder: Path,
        decode: Callable[[Sequence[int]], str],
        spec: LocalBackendSpec,
        *,
        vocab: int | None,
        context: int | None,
        vision: Vision | None,
    ) -> None:
        """`model`: the trainer's, without wrappers, loaded from `folder`; its device and precision are used. The
        others: as `LocalBackend`."""
        super().__init__(lambda: folder, decode, spec, vocab=vocab, context=context, vision=vision)
        self._model = model

    def _load(self, folder: Path) -> tuple[BatchedModel, RowTable]:
        if self._spec.threads is not None:
            torch.set_num_threads(self._spec.threads)
        first = next(self._model.parameters())
        rows, repeatable = self._spec.max_batch, self._spec.deterministic
        packed: BatchedModel
        if self._vision is None:
            packed = _SharedModel(self._model, folder, first.device, first.dtype, rows, repeatable=repeatable)
        else:
            packed = _SharedVisionModel(
                self._model, folder, first.device, first.dtype, rows, vision=self._vision, repeatable=repeatable
            )
        return packed, RowTable(packed.store, rows, stash_budget(first.device), reuse=packed.reuses_prefixes)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the block the model belongs to the sampler."""
        model = self._model
        text = model.config.get_text_config()
        before = text._attn_implementation
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        if self._worker is not None:  # `start` sets it after its check of the model
            self._attend(ATTENTION)
        try:
            yield
        finally:
            self._attend(before)
            for module, training in modes:
                module.training = training

    def _attend(self, name: str) -> None:
        self._model.set_attn_implementation(name if self._vision is None else {"text_config": name})

    async def weights_changed(self, version: int) -> None:
        """Drop what was computed with older weights. Tokens sampled from now on carry this version."""
        worker = self._started()

        def forget() -> None:
            worker.table.clear()
            worker.version = version

        await worker.call(forget)
