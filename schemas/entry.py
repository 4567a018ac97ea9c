"""Code that a spec names: entry points, environments, tools, and the adapters that run those of other libraries
unchanged.

    environment: {adapter: gymnasium, use: FrozenLake-v1, with: {kwargs: {is_slippery: false}}}

The core has no adapter. Plugins add them to the points `adapters` and `tool_adapters`, with what holds for each;
packages also by entry points, of which only the name and the class are known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, model_validator

from engine import plugin
from engine.schemas.base import Bytes, Contract, Seconds, Struct
from engine.schemas.sections import NameOf

Effects = Literal["pure", "replayable", "external"]
"""What a crash may do with a call that was made already.

`pure`: nothing; its recorded answer is enough. `replayable`: it is called again to rebuild its state,
and must answer the same. `external`: it cannot be called again, so the episode starts anew.
"""


class Entry(Contract):
    """An object of your own, by entry point."""

    use: str = Field(min_length=1)
    """`package.module:Name`, or a name that an installed package offers."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments for its constructor."""

    @property
    def facts(self) -> AdapterFacts | ToolAdapterFacts | None:
        """What holds for its adapter; None: it has none."""
        return None

    @property
    def entry(self) -> Entry:
        """What runs and its keyword arguments: the adapter's, where there is one."""
        if self.facts is None:
            return self
        return Entry(use=self.facts.runs, with_={"use": self.use, **self.with_})


IsolationMode = Annotated[str, NameOf(point="isolation_modes", core=("thread",))]
"""Where code runs: `thread` is the core's, others are plugins'."""


class IsolationSpec(Contract):
    """Where code of the spec runs, and its limits there. The default of each key is the value of the spec's
    `isolation`."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"mode": "isolation_modes"}

    mode: IsolationMode | None = None
    """`thread`: in the engine's process. `process`: each object in a worker process, which is killed at a deadline."""
    memory: Bytes | None = None
    """Maximum memory of one worker process. Default: 4GB."""
    cpu: Seconds | None = None
    """Maximum CPU time of one call. Default: only its deadline."""
    output: Bytes | None = None
    """Maximum bytes that one call may print, and maximum bytes of its answer. Default: 16MB."""
    processes: int | None = Field(default=None, ge=1)
    """Maximum number of processes and threads of one worker, including itself. Default: 256 if the engine runs as root,
    else no limit."""
    workers: int | None = Field(default=None, ge=1)
    """Maximum number of worker processes at once; further calls wait. Default: 64 for functions, one per object of a
    running episode."""
    user: str | None = Field(default=None, min_length=1)
    """The system user of the workers, where the engine runs as root; `engine` is the engine's own. Left out: an
    unprivileged uid for each worker."""

    @property
    def limits(self) -> dict[str, int | float | str]:
        """What is set beside `mode`."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "mode"}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, default: IsolationSpec | None) -> IsolationSpec:
        """This one, with what it leaves out taken from `default`."""
        if default is None or self.mode == "thread":
            return self
        missing = [name for name in type(self).model_fields if getattr(self, name) is None]
        return self.model_copy(update={name: getattr(default, name) for name in missing})

    @model_validator(mode="before")
    @classmethod
    def _by_mode(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _limits_bind(self) -> IsolationSpec:
        if self.mode == "thread" and self.limits:
            named = " and ".join(f"`{name}`" for name in self.limits)
            raise ValueError(f"{named} cannot limit code in a thread of the engine's process; write `mode: process`")
        return self


class AdapterFacts(Struct, frozen=True, kw_only=True):
    """What holds for one adapter. Checks, docs and engine read these facts here."""

    name: str
    """What a spec writes as `environment.adapter`."""
    runs: str
    """Entry point of the class that runs. It is built with `use`, `base` (the spec's folder) and the spec's `with`."""
    use: str
    """What `environment.use` names, in words."""
    names: Literal["code", "file", "name", "name or code"]
    """What `environment.use` is: `code` (`package.module:Name` or `path/file.py:Name`), `file` (a path relative to the
    spec), `name` (of the library's own), or `name or code` (code if it has a colon)."""
    rewards: Literal["turn", "end", "turn and end"]
    """When its rewards come: each with the turn that earned it, or after the last turn."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable."""
    loads: str | None = None
    """Entry point of a function that loads what all environments in one process share, such as the library. A new
    worker process calls it with the arguments of the class that runs before it builds one, so that it does not count
    for `environment.timeout`."""
    install: str = ""
    """The command that installs them, or other words that say how."""
    effects: Effects = "replayable"
    """`environment.effects` where the spec does not say it."""
    thread_safe: bool = False
    """Whether environments may run in threads of one process. Otherwise each has a worker process, unless `isolation`
    says `thread`."""
    images: bool = False
    """Whether it may show images."""
    truncates: bool = False
    """Whether it tells an episode that ran out of time (`truncated`) from one that is over."""
    tools: Literal["none", "some", "all"] = "none"
    """Which of its environments bring tools that the model is shown."""
    reads_written: bool = False
    """Whether it reads replies as they were sampled (`EpisodeView.written`): with tool calls and reasoning."""


class ToolAdapterFacts(Struct, frozen=True, kw_only=True):
    """What holds for one kind of tool servers. Checks, docs and engine read these facts here."""

    name: str
    """What a spec writes as `adapter` of a tool."""
    runs: str
    """Entry point of the class that runs. It is built once a run, with `use`, `base` (the spec's folder) and `with`."""
    use: str
    """What the tool's `use` names, in words."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable."""
    install: str = ""
    """The command that installs them, or other words that say how."""


def installed_points(group: str) -> Mapping[str, Mapping[str, str]]:
    """The entry points of a group: name -> entry point -> its package, with the version. Imports nothing."""
    return _points(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _points(group: str, path: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The same for one import path."""
    from importlib.metadata import entry_points  # specs without an adapter do not need it, and its import costs 8 ms

    packages: dict[str, dict[str, str]] = {}
    for point in entry_points(group=group):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "?"
        packages.setdefault(point.name, {})[point.value] = package
    return packages


Facts = TypeVar("Facts", AdapterFacts, ToolAdapterFacts)


class Adapters(Generic[Facts]):
    """Adapters of environments, or of servers of tools: those of plugins, and those that other packages offer.

    Of the latter only the name and the class are known, so the facts are those that forbid nothing; a spec may write
    `effects` and `isolation`.
    """

    def __init__(self, what: str, facts: type[Facts], **offered: Any) -> None:
        self.what = what
        """What one is, in words."""
        self.point = what.replace(" ", "_") + "s"
        """The point of plugins that add some."""
        self.group = f"episode_engine.{self.point}"
        """The entry points with which packages offer some: a name, and the class that runs."""
        self._facts: Any = facts
        self._offered = offered

    def of_plugins(self) -> dict[str, Facts]:
        """Those of plugins, by name."""
        facts: dict[str, Facts] = plugin.loaded(self.point, of=self._facts)
        return facts

    def __getitem__(self, name: str) -> Facts:
        """The facts of one.

        Raises:
            ValueError: there is none of this name; the message names the nearest and lists the names.
        """
        packages: Mapping[str, Mapping[str, str]] = installed_points(self.group)
        of_plugins: dict[str, Facts] = self.of_plugins()
        points: Mapping[str, str] = packages.get(name, {})
        if name in of_plugins:
            return of_plugins[name]
        if len(points) == 1:
            facts: Facts = self._facts(
                name=name, runs=next(iter(points)), use="what its package documents", **self._offered
            )
            return facts
        if points:
            offers = ", ".join(sorted(points.values()))
            raise ValueError(f"several packages offer the {self.what} `{name}`: {offers}; uninstall all but one")
        if belongs := plugin.missing(self.point, name):
            raise ValueError(f"there is no `adapter: {name}`; {belongs}")
        names = [*of_plugins, *(offered for offered, there in packages.items() if len(there) == 1)]
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        listed = f"; write one of {', '.join(f'`{item}`' for item in names)}" if names else ""
        raise ValueError(f"there is no `adapter: {name}`{hint}{listed}")


ADAPTERS = Adapters(
    "adapter",
    AdapterFacts,
    names="name",
    rewards="turn and end",
    images=True,
    truncates=True,
    tools="some",
    reads_written=True,
)
TOOL_ADAPTERS = Adapters("tool adapter", ToolAdapterFacts)


class EnvironmentSpec(Entry):
    """The environment of each episode."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"adapter": "adapters"}

    adapter: str | None = None
    """The library that `use` belongs to, such as `slime`; left out, `use` is a class of the engine's own form."""
    effects: Effects = "replayable"
    timeout: Seconds = 60.0
    """Deadline for each of its calls."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""

    @property
    def facts(self) -> AdapterFacts | None:
        return None if self.adapter is None else ADAPTERS[self.adapter]

    def entry_in(self, base: Path) -> Entry:
        """`entry` for a spec in the folder `base`, which an adapter is given because `use` may be a path."""
        entry = self.entry
        return entry if self.facts is None else Entry(use=entry.use, with_={**entry.with_, "base": str(base)})

    @property
    def default_mode(self) -> str:
        """Where it runs if neither its own `isolation` nor the spec's says it."""
        return "thread" if self.facts is None or self.facts.thread_safe else "process"

    @model_validator(mode="before")
    @classmethod
    def _effects_of_adapter(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("adapter"), str) and "effects" not in value:
            return {**value, "effects": ADAPTERS[value["adapter"]].effects}
        return value


class ToolSpec(Entry):
    """One tool: a typed function, or a class that is built with `with` and then called. With `adapter`, all tools of a
    server."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"adapter": "tool_adapters"}

    adapter: str | None = None
    """The kind of server that `use` names, such as `mcp`; left out, `use` is a function or class."""
    name: str | None = None
    """Its name for the model. Default: the function's name. Not with `adapter`."""
    timeout: Seconds | None = None
    """Deadline for one call. Default: `limits.tool_seconds`."""
    effects: Effects = "pure"
    """With `adapter`, where it is left out: `pure` for tools that their server calls read-only, `external` for
    others."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out. Not with `adapter`."""

    @property
    def facts(self) -> ToolAdapterFacts | None:
        return None if self.adapter is None else TOOL_ADAPTERS[self.adapter]

    @model_validator(mode="after")
    def _server(self) -> ToolSpec:
        if self.facts is not None and self.name is not None:
            raise ValueError("`name` is for one tool, and a server has several; write `with: {prefix: …}`")
        if self.facts is not None and self.isolation is not None:
            raise ValueError("`isolation` has no effect on a server of tools, which runs outside of the engine")
        return self
