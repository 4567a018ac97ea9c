"""Vision-language models of the local backend: batched as text is, with the images of each prompt.

A forward pass takes the packed tokens of many sequences. Position ids come from the model's own code (`get_rope_index`
for three-dimensional positions), for each prompt by itself.

Invariant: the features of an image enter the pass at exactly its placeholders; an image is never split between passes,
and the cached tokens of an image are reused only for the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.plugins.local.kv import ATTENTION, Plan, PromptImages, RowChunk
from engine.plugins.local.load import BatchedModel
from engine.tokens.vision import Vision


def place_images(
    vision: Vision, ids: np.ndarray, digests: list[str], spans: Sequence[tuple[int, int]], marks: dict[str, int]
) -> PromptImages | None:
    """The images of a prompt, or None without images.

    Args:
        vision: The model's image processing.
        ids: The prompt, int32 [tokens].
        digests: Its images, in order.
        spans: The tokens [start, end) of each image.
        marks: A negative number for each image seen before; images that are new are added.
    """
    if not digests:
        return None
    marked = ids.copy()
    for digest, (start, end) in zip(digests, spans, strict=True):
        here = marked[start:end]
        here[here == vision.placeholder_id] = marks.setdefault(digest, -1 - len(marks))
    return PromptImages(ids, marked, digests, list(spans))


class VisionModel(BatchedModel):
    """A model with a vision tower whose forward pass takes tokens and images of many sequences at once."""

    auto_class = "AutoModelForImageTextToText"
    attention = {"text_config": ATTENTION}  # noqa: RUF012  never changed

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        *,
        vision: Vision,
        repeatable: bool = False,
        experts: bool = False,
    ) -> None:
        """See `BatchedModel`. `vision`: the model's image processing.

        Raises:
            BackendError: Kind `unsupported_model`: transformers has no such model, or its log-probs depend on the
                batch.
        """
        self.vision = vision
        # a token's bits depend on how many tokens its pass has
        self.reuses_prefixes = not repeatable
        super().__init__(folder, device, dtype, rows, repeatable=repeatable, experts=experts)

    def _random_ids(self, length: int, seed: int) -> torch.Tensor:
        allowed = np.setdiff1d(np.arange(self.vocab), self.vision.banned)
        return torch.from_numpy(np.random.default_rng(seed).choice(allowed, (2, length)))

    def _inputs(self, chunks: Sequence[RowChunk], plan: Plan) -> dict[str, Any]:
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids])
        positions = torch.cat([self._chunk_positions(chunk) for chunk in chunks], -1)
        digests = [
            digest
            for chunk in chunks
            if chunk.images is not None
            for digest in chunk.images.within(chunk.past, chunk.past + len(chunk.ids))
        ]
        self.images_computed += len(digests)
        # in the order of their placeholders; the shapes are those of `QwenFamily.stack` and `TiledFamily.stack`
        tensors = {name: torch.from_numpy(array) for name, array in self.vision.tensors([digests]).items()}
        images = {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        return {
            "input_ids": ids.masked_fill_(ids < 0, self.vision.placeholder_id)[None].to(self.device),
            "position_ids": (positions if self._axes == 1 else positions[:, None]).to(self.device),
            **images,
        }

    def _chunk_positions(self, chunk: RowChunk) -> torch.Tensor:
        """Position ids of a chunk, int64 [3, tokens], or [1, tokens] if they are scalar."""
        places = torch.arange(chunk.past, chunk.past + len(chunk.ids))
        if chunk.images is None:
            return places.expand(self._axes, -1)
        prompt = self.positions(chunk.images)
        length = prompt.shape[-1]
        replied = places + (int(prompt.max()) + 1 - length)
        return torch.where(places < length, prompt[:, places.clamp_max(length - 1)], replied)

    @property
    def _axes(self) -> int:
        """Number of position ids of a token."""
        return 3 if hasattr(self.model.model, "get_rope_index") else 1

    def positions(self, images: PromptImages) -> torch.Tensor:
        """Position ids of a prompt with images, from the model's own code: int64 [3, tokens], or [1, tokens] if they
        are scalar."""
        if images.positions is None:
            if self._axes == 1:
                images.positions = torch.arange(len(images.ids))[None]
            else:
                found = self.model.model.get_rope_index(
                    input_ids=torch.from_numpy(images.ids.astype(np.int64))[None],
                    mm_token_type_ids=torch.tensor(self.vision.token_types([images.ids.tolist()])),
                    image_grid_thw=torch.from_numpy(self.vision.grids(images.digests)),
                )
                images.positions = found[0][:, 0]
        return images.positions

    def _forward_repeatable(self, chunks: Sequence[RowChunk], wanted: Sequence[int]) -> torch.Tensor:
        """Compute `forward` with one pass for each chunk, so that a token's bits do not depend on the other chunks."""
        logits = {place: self._forward_packed([chunk], [0]) for place, chunk in enumerate(chunks)}
        if not wanted:
            return torch.empty((0, self.vocab), device=self.device)
        return torch.cat([logits[place] for place in wanted])

    def _checked_pieces(self, length: int) -> tuple[list[int], list[int]]:
        return (sizes := [length - 3, 1, 1, 1]), sizes
