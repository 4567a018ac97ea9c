"""PlanSpec: the machine that the memory of a training is planned for."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from engine.schemas.base import Bytes
from engine.schemas.sections import SpecSection

ImageSize = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
"""Width and height in pixels: `1280x720`."""


class PlanSpec(SpecSection):
    """The machine that a training is planned for. `engine plan` and `engine validate` read it; a training does not."""

    NULLABLE: ClassVar[bool] = True

    gpu_memory: Bytes
    """Memory of one GPU. `engine validate` warns if the longest row does not fit (`train.plan`)."""
    processes: int = Field(default=1, ge=1)
    """Number of processes of the training, one for each GPU."""
    images: int | None = Field(default=None, ge=1)
    """Images of one micro-batch. Default: `limits.images`, else `model.max_images`, else 1."""
    image_size: ImageSize | None = None
    """Width and height of these images, such as `1280x720`. Default: as large as fits into the micro-batch."""
