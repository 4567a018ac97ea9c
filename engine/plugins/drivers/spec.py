"""`rollout.drivers` and `rollout.shards`: several processes, and where their rows go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from engine.schemas.sections import SpecSection

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


class DriversSpec(SpecSection):
    """Several processes that run the episodes, on Ray."""

    drivers: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Processes that drive the episodes of `engine run`, `engine eval`, `engine train` and `engine serve SPEC`, on Ray;
    other commands refuse more than 1. 1: this process alone, without Ray. `auto`: one for each 1,024 of `concurrency`,
    at most one for each core of this machine, and 1 without Ray or where the spec or the command needs one process.
    `concurrency` and `live_episodes` are those of all drivers together."""
    shards: str | None = None
    """With several drivers: a folder or URL (`s3://bucket/runs`) to which finished groups are copied. Needed if drivers
    run on several hosts."""

    @classmethod
    def of(cls, spec: EpisodeSpec) -> DriversSpec:
        """The section of a spec."""
        return cls.or_default(spec.rollout)
