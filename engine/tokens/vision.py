"""An image -> the placeholder tokens that one model family's own processor gives it.

A chat template writes one *marker* for an image. The tape holds its *expansion*: one placeholder per feature of the vision
tower, and the tokens that the family puts around them. Both begin and end with added tokens, at which text is split before it
is tokenised. So replacing one by the other in ids gives the same as the processor's replacement in text.

Invariants, checked whenever ids are appended and before every request:
- there are as many markers as images, and as many placeholders as the images' grids require;
- placeholders are in image spans and nowhere else: text that spells one is refused, and so is a reply with a sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import ImageError, RenderError
from engine.tokens.image_bank import ImageBank
from engine.tokens.images import ProcessedImage, Tensors
from engine.tokens.vision_processing import ImageProcessing, VisionFamily

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec
    from engine.schemas.trajectory import Blame
    from engine.tokens.tape import IntVector
    from engine.tokens.tokenizer import FastTokenizer


class PlacedImage(NamedTuple):
    """A processed image, and the position of its first token."""

    picture: ProcessedImage
    start: int


class Vision:
    """The images of one model. Made by `load_vision`; shared by all episodes.

    Raises:
        RenderError: the tokenizer lacks a token that stands for images of this model.
    """

    def __init__(self, family: VisionFamily, folder: Path, tokenizer: FastTokenizer, spec: ModelSpec) -> None:
        self.family = family
        self.most_images = spec.max_images
        self.most_pixels = spec.max_image_pixels
        self._tokenizer = tokenizer
        added = tokenizer.added
        missing = [token for token in (family.marker, family.placeholder) if token not in added]
        if missing:
            raise RenderError(f"the tokenizer has no token {missing[0]!r}, which stands for images of this model")
        self.marker_id = added[family.marker]
        self.placeholder_id = added[family.placeholder]
        self.forbidden = tuple(token for token in family.forbidden if token in added)
        self.banned = sorted(added[token] for token in self.forbidden)
        """Ids that must not be sampled."""
        self._banned = np.array(self.banned, np.int32)
        self.processing = ImageProcessing(family, folder, tokenizer, self.placeholder_id)
        self.bank = ImageBank(self.processing)
        """The images that were shown."""

    @property
    def processor(self) -> Any:
        """The model's own processor (transformers), without its video part.

        Raises:
            RenderError: It cannot be loaded.
        """
        return self.processing.processor

    # --- checks ---------------------------------------------------------------------------------------------

    def check_text(self, text: str, blame: Blame = "environment") -> None:
        """Refuse text that spells a token which only the processor writes.

        Raises:
            ImageError: Kind `image_placeholder`.
        """
        if "<" not in text:
            return
        for token in self.forbidden:
            if token in text:
                raise ImageError(
                    f"a text contains {token!r}, which this model reads as an image: remove it, or use an image part",
                    kind="image_placeholder",
                    blame=blame,
                )

    def check_sampled(self, ids: IntVector) -> None:
        """Refuse a reply with a token which only the processor writes.

        Args:
            ids: The reply, int32 [tokens].

        Raises:
            ImageError: Kind `sampled_placeholder`; blamed on the policy.
        """
        if len(ids) and (wrong := np.isin(ids, self._banned)).any():
            at = int(np.flatnonzero(wrong)[0])
            raise ImageError(
                f"the model sampled {self._tokenizer.decode([int(ids[at])])!r} (id {int(ids[at])}), which stands for an "
                "image, and there is none",
                kind="sampled_placeholder",
                blame="policy",
            )

    # --- markers and expansions -----------------------------------------------------------------------------

    def expand(self, ids: Sequence[int] | IntVector, digests: Sequence[str]) -> tuple[IntVector, list[PlacedImage]]:
        """Replace each marker by its image's tokens.

        Args:
            ids: int32 [tokens], with one marker per image.
            digests: The images, in order.

        Returns:
            The expanded ids, int32 [tokens], and the images with their positions.

        Raises:
            ImageError: There are not as many markers as images (kind `image_mismatch`).
        """
        flat = np.asarray(ids, np.int32)
        at = np.flatnonzero(flat == self.marker_id)
        if len(at) != len(digests):
            raise ImageError(
                f"{len(digests)} images were shown, and the chat template wrote {len(at)} markers for them: a text "
                f"spells {self.family.marker!r}, or the template does not show an image here",
                kind="image_mismatch",
                blame="policy" if len(at) > len(digests) else "spec",
            )
        if not len(at):
            return flat, []
        pieces, placed, done, length = [], [], 0, 0
        for place, digest in zip(at.tolist(), digests, strict=True):
            picture = self.bank.picture(digest)
            pieces += [flat[done:place], picture.ids]
            placed.append(PlacedImage(picture, length + place - done))
            length += place - done + len(picture.ids)
            done = place + 1
        return np.concatenate([*pieces, flat[done:]]), placed

    def compact(self, ids: IntVector, spans: Sequence[tuple[int, int]]) -> IntVector:
        """The reverse of `expand`: one marker per image, for servers that expand images themselves. int32 [tokens]"""
        marker = np.array([self.marker_id], np.int32)
        pieces, done = [], 0
        for start, end in spans:
            pieces += [ids[done:start], marker]
            done = end
        return np.concatenate([*pieces, ids[done:]])

    # --- what a forward pass takes --------------------------------------------------------------------------

    def tensors(self, rows: Sequence[Sequence[str]]) -> Tensors:
        """Inputs of the model's forward pass for a batch of sequences.

        The shapes are those of `VisionFamily.stack`.

        Args:
            rows: For each sequence, the digests of its images, in order.

        Raises:
            ImageError: An image is missing, or the processor refuses it.
        """
        tensors = [[self.bank.tensors(digest) for digest in digests] for digests in rows]
        return self.family.stack(tensors) if any(tensors) else {}

    def grids(self, digests: Sequence[str]) -> np.ndarray:
        """The grids of images, int64 [images, sides]; no tensor is made.

        Raises:
            ImageError: As in `tensors`.
        """
        return np.array([self.bank.picture(digest).grid for digest in digests], np.int64)

    def token_types(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """`mm_token_type_ids` [sequences][tokens]: 1 on placeholders, as the processor sets it for images."""
        return [(np.asarray(row) == self.placeholder_id).astype(int).tolist() for row in ids]


def load_vision(folder: Path, config: dict[str, Any], tokenizer: FastTokenizer, spec: ModelSpec) -> Vision | None:
    """The vision of a model; None for one without images. Loads neither processor nor weights.

    Args:
        folder: The model's files.
        config: Its config.json.
        tokenizer: Its tokenizer.
        spec: The spec's `model`.

    Raises:
        RenderError: The model takes images, but its tokenizer lacks the tokens for them.
    """
    from engine.tokens.vision_families import family_of

    family = family_of(config)
    return None if family is None else Vision(family, folder, tokenizer, spec)
