"""An image -> the placeholder tokens that one model family's own processor gives it.

A chat template writes one *marker* for an image. The tape holds its *expansion*: one placeholder per feature of the
vision tower, and the tokens that the family puts around them. Both begin and end with added tokens, at which text is
split before it is tokenised. So replacing one by the other in ids gives the same as the processor's replacement in
text.

Invariants, checked whenever ids are appended and before every request:
- there are as many markers as images, and as many placeholders as the images' grids require;
- placeholders are in image spans and nowhere else: text that spells one is refused, and so is a reply with a sampled
  one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import ImageError, RenderError
from engine.tokens.image_bank import ImageBank
from engine.tokens.images import ProcessedImage, Tensors, open_pixels
from engine.tokens.pixels import MODES, Recipe, open_file, scaled_pixels
from engine.tokens.vision_families import (
    ImagePlan,
    PreparedImage,
    SizedImages,
    TiledFamily,
    VisionFamily,
    checked,
    images_only,
    kept_tensors,
)

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec
    from engine.schemas.trajectory import Blame
    from engine.tokens.tape import IntVector
    from engine.tokens.tokenizer import FastTokenizer


class Vision:
    """The images of one model. Shared by all episodes.

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
                f"the model sampled {self._tokenizer.decode([int(ids[at])])!r} (id {int(ids[at])}), which stands for "
                "an image, and there is none",
                kind="sampled_placeholder",
                blame="policy",
            )

    # --- markers and expansions -----------------------------------------------------------------------------

    def expand(
        self, ids: Sequence[int] | IntVector, digests: Sequence[str]
    ) -> tuple[IntVector, list[tuple[ProcessedImage, int]]]:
        """Replace each marker by its image's tokens.

        Args:
            ids: int32 [tokens], with one marker per image.
            digests: The images, in order.

        Returns:
            The expanded ids, int32 [tokens], and the images, each with the position of its first token.

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
            placed.append((picture, length + place - done))
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

        The shapes are those of the family's `stack`.

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


class ImageProcessing:
    """How the images of one model are processed. Safe to call from several threads.

    Args:
        family: The model's family.
        folder: The model's files.
        tokenizer: Its tokenizer.
        placeholder: Id of the token that stands for one feature.
    """

    def __init__(self, family: VisionFamily, folder: Path, tokenizer: FastTokenizer, placeholder: int) -> None:
        self.family = family
        self._folder = folder
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._ids: dict[tuple[int, ...], IntVector] = {}
        """Tokens of images by grid."""

    @cached_property
    def processor(self) -> Any:
        """The model's own processor (transformers), without its video part.

        Raises:
            RenderError: It cannot be loaded.
        """
        try:
            return images_only(self.family, self._folder, self._tokenizer.real)
        except (OSError, ValueError, ImportError, TypeError) as error:
            raise RenderError(f"the image processor of {self._folder} cannot be loaded: {error}") from error

    @cached_property
    def sized(self) -> SizedImages | None:
        """What the processor makes of an image by its size alone; None if that is known from the processor only.

        Raises:
            RenderError: The processor cannot be loaded.
        """
        return checked(self.family, self.processor)

    def tokens_of_size(self, width: int, height: int) -> int | None:
        """Number of tokens of an image of this size; None if only the processor knows.

        Raises:
            ImageError: the processor refuses an image of this size.
        """
        plan = self._plan((width, height))
        return None if plan is None else len(self._expansion("", plan.text, plan.grid, plan.placeholders).ids)

    def look(self, digest: str, data: bytes) -> tuple[ProcessedImage, PreparedImage | None]:
        """An image's tokens. Its pixels are decoded, so that an incomplete file is refused where it is shown, and not
        kept.

        Returns:
            The tokens; and the image's tensors where its tokens are known from the processor only, else None.

        Raises:
            ImageError: It cannot be decoded, or the processor refuses it.
        """
        image = open_pixels(data)
        plan = self._plan(image.size, image.mode)
        if plan is None:
            return self._process(digest, image)
        return self._expansion(digest, plan.text, plan.grid, plan.placeholders), None

    def make(self, digest: str, data: bytes) -> PreparedImage:
        """An image's scaled pixels as bytes; its tensors where its tokens are known from the processor only.

        Raises:
            ImageError: As in `look`.
        """
        image = open_pixels(data)
        plan = self._plan(image.size, image.mode)
        if plan is None:
            return self._process(digest, image)[1]
        return self.arrange(scaled_pixels(image, plan.recipe), plan.grid)

    def recipe(self, data: bytes) -> Recipe | None:
        """How a worker process scales an image, from its header; None if this process must."""
        with open_file(data) as image:
            plan = self._plan(image.size, image.mode)
        return None if plan is None else plan.recipe

    def arrange(self, pixels: np.ndarray, grid: tuple[int, ...]) -> PreparedImage:
        """What is kept of pixels that were scaled by `recipe`, uint8 [tiles, height, width, 3]."""
        sized = self.sized
        assert sized is not None
        values = sized.arrange(pixels)
        return PreparedImage(values.nbytes, partial(sized.tensors, values, grid))

    def _plan(self, size: tuple[int, int], mode: str = "RGB") -> ImagePlan | None:
        """What becomes of an image, from its size and Pillow's mode of its pixels; None if only the processor knows.

        Raises:
            ImageError: The processor refuses an image of this size.
        """
        if self.sized is None or mode not in MODES:
            return None
        try:
            return self.sized.plan(*size)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise _refused(size, error) from error

    def _process(self, digest: str, image: Any) -> tuple[ProcessedImage, PreparedImage]:
        try:
            tensors, text, grid, wanted = self.family.process(self.processor, image)
        except (ValueError, TypeError, ZeroDivisionError, OSError) as error:
            raise _refused(image.size, error) from error
        return self._expansion(digest, text, grid, wanted), kept_tensors(tensors)

    def _expansion(self, digest: str, text: str, grid: tuple[int, ...], wanted: int) -> ProcessedImage:
        ids = self._ids.get(grid)
        if ids is None:
            ids = np.asarray(self._tokenizer.encode(text), np.int32)
            ids.flags.writeable = False
            self._ids[grid] = ids
        placeholders = int(np.count_nonzero(ids == self._placeholder))
        if placeholders != wanted:
            raise ImageError(
                f"an image with the grid {grid} needs {wanted} placeholders; its tokens have {placeholders}",
                kind="image_mismatch",
                blame="engine",
            )
        return ProcessedImage(digest=digest, ids=ids, placeholders=placeholders, grid=grid)

    def scaled(self, data: bytes) -> bytes:
        """An image at the size of its grid, as an RGB PNG, which is sent to servers in its place.

        Servers process images themselves, and their processors decode and scale differently (Pillow, torchvision,
        nvJPEG: up to 17 grey levels). None of them scales an image that already has its grid's size, so the server's
            pixels
        are the pixels of the training rows. This method checks that the processor does not scale the copy; without
        `sized`, that the copy's tensors equal the image's, bit for bit.

        Raises:
            ImageError: Kind `image_refused`: the processor scales the copy again, because its aspect ratio is too
                large.
        """
        from PIL import Image

        image = open_pixels(data)
        plan = self._plan(image.size, image.mode)
        family, sized = self.family, self.sized
        try:
            if isinstance(family, TiledFamily):
                raise ValueError("its tiles and the whole image are scaled separately")
            if plan is None or sized is None:
                tensors, _, wanted, _ = family.process(self.processor, image)
                copy = family.scale(self.processor, image, wanted)
                copied, _, grid, _ = family.process(self.processor, copy)
                same = grid == wanted and all(np.array_equal(copied[name], tensors[name]) for name in copied)
            else:
                copy = Image.fromarray(scaled_pixels(image, plan.recipe)[0])
                again = sized.plan(*copy.size)
                grid, same = again.grid, all(size == copy.size for size in again.recipe.sizes)
            if not same:
                size = f"{copy.size[0]} x {copy.size[1]}"
                raise ValueError(f"a copy of {size} pixels is scaled again, to the grid {grid}")
        except (ValueError, TypeError) as error:
            raise ImageError(
                f"an image of {image.size[0]} x {image.size[1]} pixels cannot be sent to a server exactly: {error}; "
                "crop it, or use `backend: {kind: local}`",
                kind="image_refused",
            ) from error
        buffer = io.BytesIO()
        copy.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


def _refused(size: tuple[int, int], error: Exception) -> ImageError:
    return ImageError(
        f"the model's processor refuses an image of {size[0]} x {size[1]} pixels: {error}",
        kind="image_refused",
    )
