"""The kinds of sources of tasks: those of the core, and those that plugins add to the point `sources`."""

from __future__ import annotations

from engine import plugin
from engine.schemas.base import Struct


class SourceFacts(Struct, frozen=True, kw_only=True):
    """What holds for one kind of source."""

    keys: tuple[str, ...]
    """The keys of `tasks` that only some kinds read, and this one does. The first must be there."""
    opens: str = ""
    """Entry point of `(loaded, limit) -> engine.spec.rows.sources.Rows`, which opens the rows; `limit`: how many are needed, None: all may
    be. Empty for kinds of the core."""
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
