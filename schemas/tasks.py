"""Where tasks come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract


class TasksSpec(Contract):
    """Where tasks come from."""

    source: Literal["inline", "jsonl", "parquet", "hub", "python"]
    rows: list[dict[str, Any]] | None = None
    """For `inline`: the rows."""
    path: str | None = None
    """For `jsonl` and `parquet`: the file, relative to the spec. For `hub`: the data set's id."""
    name: str | None = None
    """For `hub`: the configuration."""
    split: str = "train"
    """For `hub`: the split."""
    use: str | None = None
    """For `python`: `package.module:callable` that returns an iterable of rows."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For `python`: its keyword arguments."""
    map: dict[str, str] = Field(default_factory=dict)
    """Field of the task -> field of the row; every field of the row when left out."""
    id: str | None = None
    """The row's field that names the task; its position when left out."""
    user: str | None = None
    """The row's field that names the task's user, of `users`."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many rows."""

    @model_validator(mode="after")
    def _complete(self) -> TasksSpec:
        need = {"inline": "rows", "jsonl": "path", "parquet": "path", "hub": "path", "python": "use"}[self.source]
        if getattr(self, need) is None:
            raise ValueError(f"`source: {self.source}` needs `{need}`")
        return self
