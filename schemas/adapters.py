"""The environments of other libraries that run unchanged: which there are, and what holds for each.

    environment: {adapter: gymnasium, use: FrozenLake-v1, with: {kwargs: {is_slippery: false}}}

The classes that run are in `engine/plugins/adapters/`, one file each; a class is imported when a run needs it, and its
library when an episode begins. To add an adapter: its file there, and its entry in `ADAPTERS`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Literal

from engine.schemas.entry import Effects


def _install(extra: str) -> str:
    return f"pip install 'episode-engine[{extra}]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
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
    extra: str | None = None
    """The engine's extra that installs them; None: they are on no package registry."""
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

    @property
    def install(self) -> str:
        """How its packages are installed."""
        if not self.packages:
            return ""
        if self.extra is None:
            return f"it needs {' and '.join(f'`{name}`' for name in self.packages)} on the import path (PYTHONPATH)"
        return _install(self.extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAdapterFacts:
    """What holds for one kind of tool servers. Checks, docs and engine read these facts here."""

    name: str
    """What a spec writes as `adapter` of a tool."""
    runs: str
    """Entry point of the class that runs. It is built once in a run, with `use`, `base` (the spec's folder) and `with`."""
    use: str
    """What the tool's `use` names, in words."""
    packages: tuple[str, ...] = ()
    """Top-level modules that must be importable."""
    extra: str | None = None
    """The engine's extra that installs them; None: it needs none."""

    @property
    def install(self) -> str:
        """How its packages are installed."""
        return "" if self.extra is None else _install(self.extra)


ADAPTERS: dict[str, AdapterFacts] = {
    facts.name: facts
    for facts in (
        AdapterFacts(
            name="slime",
            runs="engine.plugins.adapters.slime:SlimeEnvironment",
            use="an `env_*.py` file of slime's form and its function: `path/env.py:build_env`",
            names="code",
            loads="engine.plugins.adapters.slime:load",
            rewards="turn",
            images=True,
            reads_written=True,
        ),
        AdapterFacts(
            name="skyrl_gym",
            runs="engine.plugins.adapters.skyrl_gym:SkyRLEnvironment",
            use="an id that is registered with SkyRL-gym, or a class: `package.module:Name`, `path/file.py:Name`",
            names="name or code",
            rewards="turn",
            packages=("skyrl_gym",),
            loads="engine.plugins.adapters.skyrl_gym:load",
            extra="skyrl-gym",
            reads_written=True,
        ),
        AdapterFacts(
            name="gymnasium",
            runs="engine.plugins.adapters.gymnasium:GymnasiumEnvironment",
            use="an id that is registered with Gymnasium: `FrozenLake-v1`, or `module:Id` to import the module first",
            names="name",
            rewards="turn",
            packages=("gymnasium",),
            loads="engine.plugins.adapters.gymnasium:load",
            extra="gymnasium",
            images=True,
            truncates=True,
        ),
        AdapterFacts(
            name="verifiers",
            runs="engine.plugins.adapters.verifiers:VerifiersEnvironment",
            use="the function that returns the environment: `package.module:load_environment`, `path/file.py:load_environment`",
            names="code",
            rewards="turn and end",
            packages=("verifiers",),
            loads="engine.plugins.adapters.verifiers:load",
            extra="verifiers",
            images=True,
            truncates=True,
            tools="some",
        ),
        AdapterFacts(
            name="reasoning_gym",
            runs="engine.plugins.adapters.reasoning_gym:ReasoningGymEnvironment",
            use="the name of a data set of reasoning-gym; `rows`: each row names its own",
            names="name",
            rewards="turn",
            packages=("reasoning_gym",),
            loads="engine.plugins.adapters.reasoning_gym:load",
            extra="reasoning-gym",
            effects="pure",
        ),
        AdapterFacts(
            name="verl",
            runs="engine.plugins.adapters.verl.tools:VerlTools",
            use="verl's tool YAML (`tool_config_path`); verl need not be installed",
            names="file",
            loads="engine.plugins.adapters.verl.tools:load",
            rewards="turn and end",
            images=True,
            tools="all",
        ),
        AdapterFacts(
            name="harbor",
            runs="engine.plugins.adapters.harbor:HarborEnvironment",
            use="`shell` (the model has a tool of that name) or `program` (for an agent program); with `tasks: {source: harbor}`",
            names="name",
            rewards="end",
            thread_safe=True,
            tools="some",
        ),
    )
}
"""The adapters that ship, by name."""


TOOL_ADAPTERS: dict[str, ToolAdapterFacts] = {
    facts.name: facts
    for facts in (
        ToolAdapterFacts(
            name="mcp",
            runs="engine.plugins.adapters.mcp:McpServer",
            use="the command line of an MCP server, or its http address",
            packages=("mcp",),
            extra="mcp",
        ),
    )
}
"""The kinds of tool servers that ship, by name."""


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


def tool_adapter_facts(name: str) -> ToolAdapterFacts:
    """The facts of a kind of tool servers.

    Raises:
        ValueError: there is none of this name; the message names the nearest and lists the names.
    """
    found = TOOL_ADAPTERS.get(name) or installed_tool_adapters().get(name)
    if found is None:
        raise ValueError(
            _unknown("tool adapter", name, [*TOOL_ADAPTERS, *installed_tool_adapters()], TOOL_ADAPTERS_GROUP)
        )
    return found


def adapter_facts(name: str) -> AdapterFacts:
    """The facts of an adapter.

    Raises:
        ValueError: there is none of this name; the message names the nearest and lists the names.
    """
    found = ADAPTERS.get(name) or installed_adapters().get(name)
    if found is None:
        raise ValueError(_unknown("adapter", name, [*ADAPTERS, *installed_adapters()], ADAPTERS_GROUP))
    return found


def _unknown(what: str, name: str, known: list[str], group: str) -> str:
    points = installed_points(group).get(name, {})
    if points:
        offers = ", ".join(sorted(points.values()))
        return f"several packages offer the {what} `{name}`: {offers}; uninstall all but one"
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"there is no {what} `{name}`{hint}; write one of {', '.join(f'`{item}`' for item in known)}"
