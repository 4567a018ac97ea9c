"""Where tasks come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract


class TasksSpec(Contract):
    """Where tasks come from."""

    source: Literal["inline", "jsonl", "csv", "parquet", "hub", "python"]
    rows: list[dict[str, Any]] | None = None
    """For `inline`: the rows."""
    path: str | None = None
    """For `jsonl`, `csv` and `parquet`: the file, or a folder of such files, relative to the spec. For `hub`: a data set's id,
    or a folder that the package `datasets` reads or has saved."""
    name: str | None = None
    """For `hub`: the configuration."""
    split: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]*(\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\])?$")
    """Which rows: a split (`test`; of a folder, the files whose names begin with it), a part of the rows (`[100:]`, `[:90%]`),
    or both (`train[:90%]`). All rows when left out; for `hub`, `train`."""
    shuffle: int | None = Field(default=None, ge=0)
    """Seed of a random order of the rows, which depends on it and on the number of rows alone. The source's order when left out."""
    use: str | None = None
    """For `python`: `package.module:callable` that returns an iterable of rows."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For `python`: its keyword arguments."""
    map: dict[str, str] = Field(default_factory=dict)
    """Field of the task -> field of the row, also dotted (`reward_model.ground_truth`). Default: every field of the row."""
    id: str | None = None
    """The row's field with the task's id. Default: the row's position."""
    user: str | None = None
    """The row's field that names the task's user, of `users`."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many rows, after `split` and `shuffle`."""
    overlong: Literal["drop", "error"] | None = None
    """What to do about rows whose prompt leaves no room for a turn of `limits.turn_tokens`: leave them out, with a count, or refuse
    to run. When left out, rows are not counted, and each such episode ends by a limit."""

    @model_validator(mode="after")
    def _complete(self) -> TasksSpec:
        need = {"inline": "rows", "python": "use"}.get(self.source, "path")
        if getattr(self, need) is None:
            raise ValueError(f"`source: {self.source}` needs `{need}`")
        if self.split_name is not None and self.source in ("inline", "python"):
            raise ValueError(
                f"`split`: rows of `source: {self.source}` have no named splits; take a part: `split: '[:90%]'`"
            )
        return self

    @property
    def split_name(self) -> str | None:
        """The split's name, without the part of its rows; None if `split` names none."""
        return (self.split or "").partition("[")[0] or None

    @property
    def rows_of_split(self) -> tuple[str | None, str | None]:
        """Where the part of the rows begins and ends, as written: `100`, `-5`, `90%`; None: at the first or last row."""
        start, _, stop = (self.split or "").partition("[")[2].removesuffix("]").partition(":")
        return start or None, stop or None
