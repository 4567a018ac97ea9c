"""What people write under `tasks`, validated: where tasks come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine import plugin
from engine.schemas.base import Contract, Struct
from engine.schemas.model import PromptField
from engine.schemas.sections import NameOf, OneOf


class SourceFacts(Struct, frozen=True, kw_only=True):
    """What holds for one kind of source."""

    keys: tuple[str, ...]
    """The keys of `tasks` that only some kinds read, and this one does. The first must be there."""
    opens: str = ""
    """Entry point of `(loaded, limit) -> engine.spec.rows.row.Rows`, which opens the rows; `limit`: how many are
    needed, None: all may be. Empty for kinds of the core."""
    splits: bool = False
    """Whether its rows may have splits with names."""
    outside: bool = False
    """Whether its rows come from code or over a network, so that checks do not read them."""


CORE_SOURCES: dict[str, SourceFacts] = {
    "inline": SourceFacts(keys=("rows",)),
    "jsonl": SourceFacts(keys=("path",), splits=True),
    "csv": SourceFacts(keys=("path",), splits=True),
    "parquet": SourceFacts(keys=("path",), splits=True),
    "hub": SourceFacts(keys=("path", "name"), splits=True, outside=True),
    "python": SourceFacts(keys=("use", "with"), outside=True),
}
"""The kinds of the core, by the name in `tasks.source`."""
MIX = "mix"
"""Several sources: not a kind of its own, but `tasks.source` may name it."""
PLUGIN_KEYS = ("unsupported",)
"""Keys of `tasks` that no kind of the core reads."""


def all_sources() -> dict[str, SourceFacts]:
    """All kinds, and `mix`; those of plugins last."""
    core = CORE_SOURCES | {MIX: SourceFacts(keys=("mix",), splits=True)}
    return core | plugin.loaded("sources", core, of=SourceFacts)


SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
_SHARED = ("preset", "map", "id", "user", "shuffle")
"""Keys of `tasks` that hold for each source of a mix."""
_PART = re.compile(r"@\[-?[0-9]*:-?[0-9]*\]$")


class RowPreset(Contract):
    """Base class of the presets of `tasks.preset`: rows of another program's data files."""

    if TYPE_CHECKING:
        name: str = ""  # each preset has a literal of its own
    part_in_path: ClassVar[bool] = False
    """Whether `path` may end with a part of the rows: `train.jsonl@[0:100]`."""

    @property
    def conversation(self) -> PromptField:
        """Where the conversation stands, if the spec has no `prompt`."""
        raise NotImplementedError

    def task_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A row's fields, and those that the program adds.

        Raises:
            ValueError: a field that the preset needs is not there, or has another form.
        """
        raise NotImplementedError


class TaskSource(Contract):
    """One source of rows, and how its rows become tasks."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"source": "sources"}

    source: Annotated[str, NameOf(point="sources", core=tuple(CORE_SOURCES))]
    """What the rows are read from."""
    rows: list[dict[str, Any]] | None = None
    """For `inline`: the rows."""
    path: str | None = None
    """For `jsonl`, `csv` and `parquet`: the file, or a folder of such files, relative to the spec. For `hub`: a data
    set's id, or a folder that the package `datasets` reads or has saved."""
    name: str | None = None
    """For `hub`: the configuration."""
    split: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]*(\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\])?$")
    """Which rows: a split (`test`; of a folder, the files whose names begin with it), a part of the rows (`[100:]`,
    `[:90%]`), or both (`train[:90%]`). All rows when left out; for `hub`, `train`."""
    shuffle: int | None = Field(default=None, ge=0)
    """Seed of a random order of the rows, which depends on it and on the number of rows alone. The source's order when
    left out."""
    use: str | None = None
    """For `python`: `package.module:callable` that returns an iterable of rows."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For `python`: its keyword arguments."""
    unsupported: Literal["drop", "error"] | None = None
    """What to do about tasks of a source that do not run here: leave them out, with a count in the log, or refuse to
    run (when left out, too). Tasks that cannot be read are always refused."""
    map: dict[str, str] = Field(default_factory=dict)
    """Field of the task -> field of the row, also dotted (`reward_model.ground_truth`). Default: every field of the
    row."""
    id: str | None = None
    """The row's field with the task's id. Default: the row's position."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many rows, after `split` and `shuffle`."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        need = self.facts.keys[0]
        if getattr(self, {"with": "with_"}.get(need, need)) in (None, {}):
            raise ValueError(f"`source: {self.source}` needs `{need}`")
        if self.split is not None and self.source == MIX:
            raise ValueError("`split` belongs to the sources: write it under each source of `mix`")
        if self.split_name is not None and not self.facts.splits:
            raise ValueError(
                f"`split`: rows of `source: {self.source}` have no named splits; take a part: `split: '[:90%]'`"
            )
        return self

    @property
    def facts(self) -> SourceFacts:
        """What holds for this kind of source. Raises: ValueError: its plugin cannot be used."""
        facts = CORE_SOURCES.get(self.source) or all_sources().get(self.source)
        if facts is None:
            raise ValueError(f"`source: {self.source}` cannot be read; {plugin.missing('sources', self.source)}")
        return facts

    @property
    def split_name(self) -> str | None:
        """The split's name, without the part of its rows; None if `split` names none."""
        return (self.split or "").partition("[")[0] or None


class MixedSource(TaskSource):
    """One source of a mix. `map`, `id` and `shuffle` of `tasks` hold where it has none of its own."""

    weight: float = Field(default=1.0, gt=0.0)
    """Its share of the tasks, relative to the weights of the other sources."""


class TasksSpec(TaskSource):
    """Where tasks come from."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"source": "sources", "overlong": "overlong"}

    source: Annotated[str, NameOf(point="sources", core=(*CORE_SOURCES, MIX))]
    mix: Annotated[dict[SourceName, MixedSource], Field(min_length=1)] | None = None
    """For `mix`: several sources by name. A task's id begins with the name of its source: `easy:17`."""
    preset: Annotated[RowPreset, OneOf("row_presets", key="name", base=RowPreset)] | None = None
    """Whose data file it is: `verl`, `slime`, or `{name: slime, input_key: …}`. Without `prompt`, episodes begin with
    its rows' conversations."""
    user: str | None = None
    """The row's field that names the task's user, of `users`."""
    overlong: Annotated[str, NameOf(point="overlong")] | None = None
    """What to do about rows whose prompt leaves no room for a turn of `limits.turn_tokens`: leave them out, with a
    count, or refuse to run. When left out, rows are not counted, and each such episode ends by a limit."""

    @field_validator("preset", mode="before")
    @classmethod
    def _preset_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def file(self) -> str:
        """`path`, without the part of the rows (`@[0:100]`) that a preset lets stand behind it."""
        path = self.path or ""
        return _PART.sub("", path) if self.preset is not None and self.preset.part_in_path else path

    @property
    def files(self) -> list[str]:
        """`file` of each source that has one."""
        return [one.file for one in self.sources if one.file]

    @property
    def sources(self) -> list[TasksSpec]:
        """The sources of the mix; without `mix`, this one."""
        return list(self.mixed().values()) or [self]

    @property
    def rows_of_split(self) -> tuple[str | None, str | None]:
        """Where the part of the rows begins and ends, as written: `100`, `-5`, `90%`; None: the first or last row."""
        part = self.split or (self.path or "")[len(self.file) :].removeprefix("@")
        start, _, stop = part.partition("[")[2].removesuffix("]").partition(":")
        return start or None, stop or None

    def mixed(self) -> dict[str, TasksSpec]:
        """The sources of a mix by name, each with the keys that hold for all of them; none without `mix`."""
        shared = self.model_dump(include=set(_SHARED), exclude_unset=True, by_alias=True)
        return {
            name: TasksSpec.model_validate(
                shared | one.model_dump(exclude={"weight"}, exclude_unset=True, by_alias=True)
            )
            for name, one in (self.mix or {}).items()
        }
