"""A table: the adapters that run environments and servers of tools of other libraries unchanged, and what holds for each.

    environment: {adapter: gymnasium, use: FrozenLake-v1, with: {kwargs: {is_slippery: false}}}

The core has none. Plugins add them to the points `adapters` and `tool_adapters`, with what holds for each; packages also by entry
points, of which only the name and the class are known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, TypeVar

from engine import plugin
from engine.schemas.base import Struct
from engine.schemas.entry import Effects


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
    """Entry point of a function that loads what all environments in one process share, such as the library. A new worker process
    calls it with the arguments of the class that runs before it builds one, so that it does not count for `environment.timeout`."""
    install: str = ""
    """The command that installs them, or other words that say how."""
    effects: Effects = "replayable"
    """`environment.effects` where the spec does not say it."""
    thread_safe: bool = False
    """Whether many environments may run in threads of one process. If not, each runs in a worker process, unless the spec
    says `isolation: thread`."""
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
    """Entry point of the class that runs. It is built once in a run, with `use`, `base` (the spec's folder) and `with`."""
    use: str
    """What the tool's `use` names, in words."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable."""
    install: str = ""
    """The command that installs them, or other words that say how."""


Facts = TypeVar("Facts", AdapterFacts, ToolAdapterFacts)
ADAPTERS_GROUP = "episode_engine.adapters"
"""The entry points with which installed packages offer adapters: a name, and the class that runs."""
TOOL_ADAPTERS_GROUP = "episode_engine.tool_adapters"
"""The same for kinds of tool servers."""


def installed_points(group: str) -> Mapping[str, Mapping[str, str]]:
    """The entry points of a group: name -> entry point -> the package that offers it, with its version. Imports nothing."""
    return _points(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _points(group: str, path: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The same for one import path."""
    from importlib.metadata import entry_points  # specs without an adapter do not need it, and its import costs 8 ms

    found: dict[str, dict[str, str]] = {}
    for point in entry_points(group=group):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "?"
        found.setdefault(point.name, {})[point.value] = package
    return found


def installed_adapters() -> dict[str, AdapterFacts]:
    """The adapters that installed packages offer. Of these, only the name and the class are known, so the facts are those
    that forbid nothing; a spec may write `effects` and `isolation`."""
    return {
        name: AdapterFacts(
            name=name,
            runs=next(iter(points)),
            use="what its package documents",
            names="name",
            rewards="turn and end",
            images=True,
            truncates=True,
            tools="some",
            reads_written=True,
        )
        for name, points in installed_points(ADAPTERS_GROUP).items()
        if len(points) == 1
    }


def installed_tool_adapters() -> dict[str, ToolAdapterFacts]:
    """The kinds of tool servers that installed packages offer."""
    return {
        name: ToolAdapterFacts(name=name, runs=next(iter(points)), use="what its package documents")
        for name, points in installed_points(TOOL_ADAPTERS_GROUP).items()
        if len(points) == 1
    }


def adapter_facts(name: str) -> AdapterFacts:
    """The facts of an adapter.

    Raises:
        ValueError: there is none of this name; the message names the nearest and lists the names.
    """
    return _facts("adapter", "adapters", name, plugin_adapters(), installed_adapters(), ADAPTERS_GROUP)


def tool_adapter_facts(name: str) -> ToolAdapterFacts:
    """The facts of a kind of tool servers.

    Raises:
        ValueError: there is none of this name; the message names the nearest and lists the names.
    """
    known = plugin_tool_adapters()
    return _facts("tool adapter", "tool_adapters", name, known, installed_tool_adapters(), TOOL_ADAPTERS_GROUP)


def plugin_adapters() -> dict[str, AdapterFacts]:
    """The adapters of plugins, by name."""
    return plugin.loaded("adapters", of=AdapterFacts)


def plugin_tool_adapters() -> dict[str, ToolAdapterFacts]:
    """The kinds of tool servers of plugins, by name."""
    return plugin.loaded("tool_adapters", of=ToolAdapterFacts)


def _facts(
    what: str, point: str, name: str, of_plugins: Mapping[str, Facts], of_packages: Mapping[str, Facts], group: str
) -> Facts:
    found = of_plugins.get(name) or of_packages.get(name)
    if found is None:
        raise ValueError(_unknown(what, point, name, [*of_plugins, *of_packages], group))
    return found


def _unknown(what: str, point: str, name: str, known: list[str], group: str) -> str:
    if points := installed_points(group).get(name, {}):
        offers = ", ".join(sorted(points.values()))
        return f"several packages offer the {what} `{name}`: {offers}; uninstall all but one"
    if belongs := plugin.missing(point, name):
        return f"there is no `adapter: {name}`; {belongs}"
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    listed = f"; write one of {', '.join(f'`{item}`' for item in known)}" if known else ""
    return f"there is no `adapter: {name}`{hint}{listed}"
