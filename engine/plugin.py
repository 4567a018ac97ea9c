"""What a plugin adds to the engine, and which plugins are installed.

    PLUGIN = Plugin(name="tilt", about="A loss", losses={"tilt": "tilt_loss.spec:TiltLoss"})

A plugin is its face: one `Plugin`, whose values are names and entry points (`module:object`). Importing a face imports
nothing else; what an entry point names is imported when it is needed. The engine's own plugins are the folders of
`engine/plugins/` (`PLUGIN` of each), other packages name theirs in the entry-point group `episode_engine.plugins`.

Only the standard library is imported here, so that `engine/schemas/` may ask which plugins there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

GROUP = "episode_engine.plugins"
OFF = "ENGINE_PLUGINS_OFF"
"""Environment variable: plugins to leave out, separated by commas; `*`: all; `strangers`: those of other packages."""
HOOKS = frozenset(
    {
        "auxiliary_objective",
        "drive",
        "evaluate_training",
        "examine_file",
        "filter_draws",
        "find_run",
        "lend_memory",
        "observe_episodes",
        "observe_run",
        "observe_training",
        "open_run",
        "open_service",
        "record_scenario",
        "reviews",
        "reward_source",
        "slow_findings",
        "spec_facts",
    }
)
"""The names of all hooks. Each is a `Hook` beside the code that calls it."""
SLOW = "slow_findings"
"""The hook whose code is imported only when it is called."""
OWNERS = frozenset({"", "limits", "rollout", "train"})
"""The parts of the spec to which plugins may add keys: paths of the `SectionOwner` classes."""
COMMAND_GROUPS = {"import": "Convert a configuration of another engine to a spec."}
"""Groups of commands, to which only plugins add, and the help of each."""
REINSTALL = "pip install --force-reinstall --no-deps episode-engine"
"""What brings a folder of `engine/plugins/` back."""
PLUGINS = "engine.plugins."
"""The package of the engine's own plugins."""
BELONGS = "it belongs to the plugin"
"""How the text of `missing` begins."""
T = TypeVar("T")
M = TypeVar("M")
P = ParamSpec("P")
Entries = Mapping[str, str]
"""Name -> `module:object`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys that a plugin adds to a part of the spec."""

    owner: str = ""
    """The part, one of `OWNERS`: empty for the top level."""
    keys: tuple[str, ...]
    use: str
    """`module:class`, an `engine.schemas.sections.SpecSection`."""
    inline: bool = False
    """The keys are the fields of the class. Otherwise there is one key, and the class is its value."""
    resumable: tuple[str, ...] = ()
    """Those of the keys that a resumed training may change."""

    def path(self, key: str) -> str:
        """The path of one of the keys in the spec: `train.plan`."""
        return f"{self.owner}.{key}".lstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The face of a plugin: what it is, and what it adds."""

    name: str
    about: str
    """One line."""
    install: str = REINSTALL
    """The command that installs it, for messages."""
    needs: tuple[str, ...] = ()
    """Other plugins without which it cannot be used."""
    sections: tuple[Section, ...] = ()
    backends: Entries = field(default_factory=dict)
    """`backend.kind` -> its config class, a `BackendBase`."""
    models: Entries = field(default_factory=dict)
    """Name of a model that is made locally -> its `engine.tokens.catalogue:MadeEntry`."""
    launchers: Entries = field(default_factory=dict)
    """`backend.kind` -> function that makes the servers of `backend.launch`: see `engine.plugins.servers.launched`."""
    losses: Entries = field(default_factory=dict)
    """`train.loss.kind` -> its config class, a `Loss`."""
    credits: Entries = field(default_factory=dict)
    """`rewards.credit.method` -> its config class, a `CreditMethod`."""
    train_kinds: Entries = field(default_factory=dict)
    """`train.kind` -> its `engine.schemas.train:TrainKind`."""
    weight_syncs: Entries = field(default_factory=dict)
    """`backend.kind` -> function that opens the `WeightSync` of a training: see `engine.train.sync.open_sync`."""
    critics: Entries = field(default_factory=dict)
    """`train.critic.kind` -> its config class, a `CriticBase`; the hook `auxiliary_objective` makes what runs."""
    actions: Entries = field(default_factory=dict)
    """Action of a state -> its `engine.actions.action_facts:ActionFacts`."""
    presets: Entries = field(default_factory=dict)
    """Value of `machine` or `machine.preset` -> its `engine.machine.preset:Preset`."""
    limits: Entries = field(default_factory=dict)
    """Limit of an episode -> its `engine.schemas.limits:Limit`. Its value is a key of an inline section of `limits`."""
    records: Entries = field(default_factory=dict)
    """Kind of a journal record -> its class, a `RecordBase`."""
    commands: Entries = field(default_factory=dict)
    """Command -> function with typer's annotations; `import NAME`: a command of the group `import`."""
    schemas: Entries = field(default_factory=dict)
    """Name of a JSON Schema file of `engine schema`, without its ending -> data class."""
    old_options: Entries = field(default_factory=dict)
    """Option that a command had, as `train --plan` -> the command line that replaces it, for a message."""
    findings_formats: Entries = field(default_factory=dict)
    """Value of `engine validate --format` -> function that writes a list of `engine.validate.report.Report`."""
    graph_formats: Entries = field(default_factory=dict)
    """Value of `engine graph --format`, also the suffix of its files -> function that draws a machine."""
    options: Entries = field(default_factory=dict)
    """`COMMAND --OPTION` -> its annotation for typer, `Annotated[…, typer.Option(…)]`; None where it is not given."""
    export_formats: Entries = field(default_factory=dict)
    """Value of `engine export --format` -> `engine.api.exports:ExportFormat`."""
    adapters: Entries = field(default_factory=dict)
    """`environment.adapter` -> its `engine.schemas.entry.AdapterFacts`."""
    tool_adapters: Entries = field(default_factory=dict)
    """`adapter` of a tool -> its `engine.schemas.entry.ToolAdapterFacts`."""
    sources: Entries = field(default_factory=dict)
    """`tasks.source` -> its `engine.schemas.tasks.SourceFacts`."""
    row_presets: Entries = field(default_factory=dict)
    """`tasks.preset` -> its config class, a `engine.schemas.tasks:RowPreset`."""
    overlong: Entries = field(default_factory=dict)
    """Value of `tasks.overlong` -> function `(tasks, loaded, template)` that gives the tasks to run: see
    `engine.runner.source.fitting_tasks`."""
    isolation_modes: Entries = field(default_factory=dict)
    """Value of `isolation.mode` -> its `engine.actions.calling.host:CodeHost`, made once for each run that needs it."""
    players: Entries = field(default_factory=dict)
    """Part of an episode that a model may play, `user` or `scorer` -> function `(path, spec)` that describes it, as a
    `engine.spec.added.PlayedRole`. A service of the plugin lets the model play it."""
    trainers: Entries = field(default_factory=dict)
    """Trainer of `--trainer` -> object with `findings(loaded)`: see `engine.validate.check.TrainerFacts`."""
    trackers: Entries = field(default_factory=dict)
    """Value of `train.report_to` -> class of a tracker: see `engine.plugins.report.trackers.Tracker`."""
    rules: tuple[str, ...] = ()
    """Modules that register rules of `engine validate`; their pages are in the folder `pages` beside the module."""
    hooks: Entries = field(default_factory=dict)
    """Name of a `Hook` -> what it calls."""


POINTS = tuple(item.name for item in fields(Plugin) if item.type == "Entries" and item.name != "hooks")
"""The fields with names of which there is one each, such as `commands`."""


@dataclass(slots=True)
class Installed:
    """The plugins of this process, by name: the engine's own first, then other packages', each sorted."""

    plugins: dict[str, Plugin]
    broken: dict[str, str]
    """Those that cannot be used, and why."""
    packages: dict[str, str]
    """The package of each: name and version."""
    left_out: dict[str, Plugin] = field(default_factory=dict)
    """The faces of broken ones, for messages about what they would add."""

    def is_own(self, name: str) -> bool:
        """Whether a plugin is one of the engine's own."""
        return self.packages[name].startswith("episode-engine ")

    def leave_out(self, name: str, error: BaseException) -> None:
        """Take a plugin that fails out, with everything that it adds, and those that need it."""
        if (face := self.plugins.pop(name, None)) is not None:
            self.left_out[name] = face
        self.broken[name] = _words(error)
        self.leave_out_needing()

    def leave_out_needing(self) -> None:
        """Take plugins out that need one which is not there. The engine's own are then as if their folders were
        gone."""
        for plugin in list(self.plugins.values()):
            lacking = [need for need in plugin.needs if need not in self.plugins]
            if not lacking or plugin.name not in self.plugins:
                continue
            if self.is_own(plugin.name) and lacking[0] not in self.broken:
                del self.plugins[plugin.name]
                self.leave_out_needing()
            else:
                self.leave_out(plugin.name, PluginError(f"it needs the plugin `{lacking[0]}`, which is not there"))


class PluginError(Exception):
    """A plugin cannot be used; the text says why."""


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"


@cache
def installed() -> Installed:
    """The plugins of `engine/plugins/` and of installed packages, found once in a process."""
    off = {name.strip() for name in os.environ.get(OFF, "").split(",")}
    present = Installed({}, {}, {})
    for name, use, package in _faces():
        is_own = package is None
        if "*" in off or name in off or (not is_own and "strangers" in off):
            continue
        shown = f"{name} ({package})" if name in present.packages else name
        present.packages[shown] = package or f"episode-engine {import_module('engine').__version__}"
        try:
            if shown != name:
                raise PluginError(f"a plugin `{name}` is there already")
            present.plugins[name] = _checked(name, load(use), present.plugins.values())
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a package of somebody else must not stop the engine)
            present.broken[shown] = _words(error)
    present.leave_out_needing()
    return present


def _faces() -> Iterator[tuple[str, str, str | None]]:
    """(name, entry point of the face, package: None for the engine's own)."""
    here = Path(__file__).parent / "plugins"
    for folder in sorted(here.iterdir()) if here.is_dir() else ():
        if (folder / "__init__.py").is_file():
            yield folder.name, f"engine.plugins.{folder.name}:PLUGIN", None
    if _may_have_strangers():
        from importlib.metadata import entry_points

        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
            yield point.name, point.value, package


def _may_have_strangers() -> bool:
    """Whether a package on the import path may have an entry point of plugins. Importing importlib.metadata costs a
    seventh of `engine --help`, and reading these files a fiftieth."""
    for place in map(Path, sys.path):
        if place.is_file():
            return True  # an archive, which importlib.metadata can read
        if any(GROUP in file.read_text("utf-8", "replace") for file in place.glob("*-info/entry_points.txt")):
            return True
        if any(place.glob("*.egg")):
            return True
    return False


def _checked(name: str, face: Any, others: Collection[Plugin]) -> Plugin:
    """A face that may be used. Raises: PluginError."""
    if not isinstance(face, Plugin):
        raise PluginError(f"its entry point names {face!r:.60}, not a Plugin")
    if face.name != name:
        raise PluginError(f"its face has the name `{face.name}`, its entry point `{name}`")
    if unknown := sorted(set(face.hooks) - HOOKS):
        raise PluginError(f"there is no hook `{unknown[0]}`; the hooks are {', '.join(sorted(HOOKS))}")
    if strange := sorted({section.owner for section in face.sections} - OWNERS):
        owners = ", ".join(f"`{owner}`" if owner else "the top level" for owner in sorted(OWNERS))
        raise PluginError(f"no keys can be added to `{strange[0]}` of the spec; they can be added to {owners}")
    for command in face.commands:
        group, _, last = command.rpartition(" ")
        if (group and group not in COMMAND_GROUPS) or last in COMMAND_GROUPS:
            raise PluginError(
                f"there can be no command `{command}`; the groups of commands are {', '.join(COMMAND_GROUPS)}"
            )
    for other in others:
        if twice := sorted(_names(other) & _names(face)):
            raise PluginError(f"the plugin `{other.name}` has {', '.join(f'`{entry}`' for entry in twice)} already")
    return face


def names_of(plugin: Plugin) -> dict[str, tuple[str, ...]]:
    """What a plugin adds: point -> names; `sections` -> the paths of its keys; `install` -> the command for it."""
    added = {"sections": tuple(section.path(key) for section in plugin.sections for key in section.keys)}
    added |= {point: tuple(getattr(plugin, point)) for point in POINTS}
    return {"install": (plugin.install,)} | {point: names for point, names in added.items() if names}


def _names(plugin: Plugin) -> set[str]:
    """Everything that only one plugin may have, as `commands plan`."""
    return {f"{point} {name}" for point, names in names_of(plugin).items() for name in names if point != "install"}


def load(use: str) -> Any:
    """Import the object of an entry point. Raises: what the import raises, AttributeError."""
    module, _, name = use.partition(":")
    return getattr(import_module(module), name)


def entries(point: str) -> dict[str, str]:
    """What all plugins add to one of `POINTS`: name -> entry point."""
    return {name: use for plugin in installed().plugins.values() for name, use in getattr(plugin, point).items()}


def loaded(
    point: str,
    core: Collection[str] = (),
    of: type | None = None,
    check: Callable[[str, Any], str | None] | None = None,
) -> dict[str, Any]:
    """The same, imported. A plugin of which something cannot be imported, is of another class, or has a name of the
    core, is left out as a whole.

    Args:
        point: One of `POINTS`.
        core: The names that the core has.
        of: The class of all of them, if they are of one.
        check: Says what is wrong with an object, given its name and itself.
    """
    values: dict[str, Any] = {}
    for plugin in list(installed().plugins.values()):
        with guarded(plugin):
            if twice := sorted(set(getattr(plugin, point)) & set(core)):
                raise PluginError(f"`{twice[0]}` in `{point}` is a name of the engine's own")
            objects = {name: load(use) for name, use in getattr(plugin, point).items()}
            for name, entry in objects.items():
                if of is not None and not isinstance(entry, of):
                    raise PluginError(f"`{name}` in `{point}` names {entry!r:.60}, not {of.__name__}")
                if check is not None and (wrong := check(name, entry)) is not None:
                    raise PluginError(f"`{name}` in `{point}` names {entry!r:.60}, {wrong}")
            values |= objects
    return values


@contextmanager
def guarded(plugin: Plugin) -> Iterator[None]:
    """Leave a plugin out if the code in this block raises."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a package of somebody else must not stop the engine)
        installed().leave_out(plugin.name, error)


def leave_out_unusable(used: Collection[str]) -> None:
    """Leave out plugins of other packages that a spec uses, and whose actions, records or hooks cannot be imported."""
    for plugin in list(installed().plugins.values()):
        if plugin.name in used and not installed().is_own(plugin.name):
            with guarded(plugin):
                rows = [load(use) for use in plugin.actions.values()]
                uses = [use for row in rows for use in (row.use, row.rewrites_machine, row.makes_room) if use]
                hooks = [use for hook, use in plugin.hooks.items() if hook != SLOW]
                for use in (*uses, *plugin.records.values(), *hooks):
                    load(use)


def missing(point: str, name: str) -> str | None:
    """Which plugin that is not installed has a name, and how to install it; None if none is known to have it.

    Args:
        point: One of `POINTS`, or `sections` with the path of a key as name.
        name: The name. Of `commands` also the name of a group: `import`.
    """
    from engine.known_plugins import KNOWN

    broken = {plugin: names_of(face) for plugin, face in installed().left_out.items()}
    for plugin, entries_of in {**KNOWN, **broken}.items():
        names = set(entries_of.get(point, ()))
        if point == "commands":
            names |= {command.rpartition(" ")[0] for command in names} - {""}
        if name in names and plugin not in installed().plugins:
            return _belongs(plugin, entries_of["install"][0])
    return None


def missing_module(module: str) -> str | None:
    """Which of the engine's own plugins that are not installed has a module, and how to install it; None: none."""
    from engine.known_plugins import KNOWN

    name = module.removeprefix(PLUGINS).partition(".")[0] if module.startswith(PLUGINS) else ""
    return _belongs(name, KNOWN[name]["install"][0]) if name in KNOWN and name not in installed().plugins else None


def _belongs(plugin: str, install: str) -> str:
    why = installed().broken.get(plugin)
    state = f"cannot be used ({why})" if why else "is not installed"
    return f"{BELONGS} `{plugin}`, which {state}: {install}"


class Hook(Generic[T]):
    """A place of the core at which plugins take part. It stands beside the code that calls it, with the type of what is
    called.

    OBSERVE: Hook[Callable[[Work], Observer | None]] = Hook("observe")
    """

    def __init__(self, name: str) -> None:
        assert name in HOOKS, name
        self.name = name

    def all(self, written: Collection[str] | None = None) -> list[T]:
        """What the plugins give, in the order of their names.

        Args:
            written: Names of the plugins whose sections a spec has. A plugin with sections that is not among them is
                neither asked nor imported. None: all are asked.

        Raises: what the import of a plugin that the spec uses raises; another one is left out.
        """
        called: list[T] = []
        for plugin in list(installed().plugins.values()):
            if self.name not in plugin.hooks or not (written is None or not plugin.sections or plugin.name in written):
                continue
            if written is not None and plugin.name in written:
                called.append(load(plugin.hooks[self.name]))
                continue
            with guarded(plugin):
                called.append(load(plugin.hooks[self.name]))
        return called

    def made(
        self: Hook[Callable[P, M | None]], written: Collection[str] | None, *args: P.args, **kwargs: P.kwargs
    ) -> list[M]:
        """What the functions make that `all` gives; one that is not needed makes None, and is left out."""
        things = [make(*args, **kwargs) for make in self.all(written)]
        return [thing for thing in things if thing is not None]
