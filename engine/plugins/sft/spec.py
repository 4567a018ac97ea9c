"""`train.data`: the rows of a training on written episodes (`train.kind: sft`)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from engine.schemas.sections import SpecSection

_Path = Annotated[str, Field(min_length=1)]


class SftDataSpec(SpecSection):
    """Which episodes of which files are trained on, and how many a step takes."""

    NULLABLE: ClassVar[bool] = True

    path: _Path | Annotated[list[_Path], Field(min_length=1)]
    """File of `engine export` (`.jsonl` or `.parquet`), a folder of such files, or a list of both; relative to the spec."""
    min_reward: float | None = None
    """Only episodes with at least this reward. All episodes if null."""
    reward: str | None = Field(default=None, min_length=1)
    """With `min_reward`: the name of the reward. Default: the sum of all rewards of the episode (`outcome.reward`)."""
    episodes_per_step: int = Field(default=32, ge=1)
    """Episodes per step. Each step makes one update with all rows of its episodes."""
