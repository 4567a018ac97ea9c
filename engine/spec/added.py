"""What the sections of plugins mean for the other parts of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engine import plugin
from engine.plugin import Hook
from engine.schemas.backend import BackendBase, default_backend
from engine.schemas.base import Struct
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.schemas.entry import Entry, IsolationSpec
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.role import RoleSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.text.diagnostic import DataPath


class Called(Struct, frozen=True, kw_only=True):
    """A function of the spec, and how the engine calls it."""

    use: str
    arguments: tuple[str, ...]
    """What the engine gives."""
    with_: Mapping[str, Any]
    """What the spec gives."""
    path: DataPath
    """Position of `use`."""
    path_with: DataPath
    """Position of `with`."""
    may_be_class: bool = False


class AddedTool(Struct, frozen=True, kw_only=True):
    """A tool that the engine gives the model."""

    path: DataPath
    """The key that asks for it."""
    make: str
    """`module:function` that makes the `BoundTool`."""


class AddedCode(Struct, frozen=True, kw_only=True):
    """A function that a part of an episode is, as a scorer is one."""

    path: DataPath
    """Position of the mapping with `use` and `with`."""
    entry: Entry
    part: str
    """What it is, in words: `condenser`."""
    takes: tuple[str, ...]
    """What the engine gives."""
    isolation: IsolationSpec | None = None
    """What the section says about where it runs."""
    isolated: bool = True
    """Whether it runs where `isolation` says; otherwise always in the engine's process."""
    keywords: tuple[str, ...] = ()
    """What the engine gives by name."""
    awaited: str = ""
    """Of a function that is cancelled at a limit, and so must be a coroutine function: what to do where it is none."""


class PlayedRole(Struct, frozen=True, kw_only=True):
    """A model that plays a part of an episode beside the policy."""

    name: str
    spec: RoleSpec
    blame: Blame
    kinds: str
    """How the kinds of its failures begin."""
    fields: tuple[str, ...]
    """What its prompt may name."""

    def shares_policy(self, spec: EpisodeSpec) -> bool:
        """Whether it speaks through the policy's backend: the same weights, and no other backend declared."""
        model, backend = self.spec.model, self.spec.backend
        if model is not None and (model.path, model.revision) != (spec.model.path, spec.model.revision):
            return False
        return backend is None or (backend == spec.backend and not backend.scripted)

    def served_by(self, spec: EpisodeSpec) -> BackendBase:
        """The backend through which it speaks."""
        return spec.backend if self.shares_policy(spec) else self.spec.backend or default_backend()


class TrainerUse(Struct, frozen=True, kw_only=True):
    """Something of a section that not every trainer carries."""

    thing: str
    """What a trainer would have to carry: `branches`, `images`, …"""
    path: DataPath
    """The key that asks for it."""
    fix: str
    """How not to use it."""


class SpecFacts(Struct, frozen=True, kw_only=True):
    """What the section of a plugin means for other parts."""

    called: tuple[Called, ...] = ()
    """Functions that it names, and that no episode calls."""
    rewards: tuple[str, ...] = ()
    """Names of rewards that its part of an episode may write."""
    one_process: tuple[tuple[str, DataPath, str], ...] = ()
    """Why several drivers cannot run the spec: a message, its place, and what to do."""
    tools: tuple[AddedTool, ...] = ()
    code: tuple[AddedCode, ...] = ()
    roles: Mapping[DataPath, PlayedRole] = msgspec.field(default_factory=dict)
    """By the position of the mapping with `model` and `prompt`."""
    trainer_uses: tuple[TrainerUse, ...] = ()
    samples_weights: bool = False
    """Whether episodes are sampled with the weights of a training for it."""
    reads_seed: bool = False
    """Whether something that it adds depends on `train.seed`."""
    tasks: tuple[Mapping[str, Any], ...] = ()
    """Further tasks, in the form of the spec's `tasks`."""


SPEC_FACTS: Hook[Callable[[EpisodeSpec], SpecFacts]] = Hook("spec_facts")


def spec_facts(spec: EpisodeSpec) -> list[SpecFacts]:
    """The facts of each plugin whose section a spec has."""
    return [facts(spec) for facts in SPEC_FACTS.all(written(spec))]


def added_tools(spec: EpisodeSpec) -> list[AddedTool]:
    """The tools that plugins give the model."""
    return [tool for facts in spec_facts(spec) for tool in facts.tools]


def added_code(spec: EpisodeSpec) -> list[AddedCode]:
    """The functions that sections of plugins name as parts of an episode."""
    return [code for facts in spec_facts(spec) for code in facts.code]


def played_parts(spec: EpisodeSpec) -> dict[DataPath, RoleSpec]:
    """The users and the scorer that a model plays, by the path where each is declared."""
    parts: dict[DataPath, RoleSpec] = {}
    for name, user in spec.users_by_name.items():
        if user.model_played:
            parts[("users", name) if name else ("user",)] = user
    if (scorer := spec.rewards.scorer) is not None and scorer.model_played:
        parts["rewards", "scorer"] = scorer
    return parts


def no_player(part: RoleSpec) -> str | None:
    """What to do because nothing lets a model play a part; None if something does."""
    if part.player in plugin.entries("players"):
        return None
    return plugin.missing("players", part.player) or "name code that plays it, with `use`"


def played_roles(spec: EpisodeSpec) -> dict[DataPath, PlayedRole]:
    """Every role that a model plays, by the path of its declaration: users, scorer, those of sections of plugins."""
    players = plugin.loaded("players")
    parts = played_parts(spec).items()
    roles = {path: players[part.player](path, part) for path, part in parts if part.player in players}
    return roles | {path: role for facts in spec_facts(spec) for path, role in facts.roles.items()}


def backends_of(spec: EpisodeSpec) -> dict[DataPath, BackendBase]:
    """The backends of the policy and of every role that declares its own, by their paths."""
    roles = played_roles(spec).items()
    backends = {(*path, "backend"): role.spec.backend for path, role in roles if role.spec.backend is not None}
    return {("backend",): spec.backend, **backends}


def trains_backend(spec: EpisodeSpec) -> bool:
    """Whether the backend gets the weights of a training: for the training's own episodes, or for those of a plugin."""
    if spec.train is None:
        return False
    return spec.train.samples_episodes or any(facts.samples_weights for facts in spec_facts(spec))


def missing_sync(kind: str) -> str | None:
    """Why nothing sends the weights of a training to a kind of backend that takes some; None if something does."""
    if kind in plugin.entries("weight_syncs"):
        return None
    fix = plugin.missing("weight_syncs", kind) or "no plugin that is installed sends them"
    return f"the weights of a training cannot be sent to a `{kind}` backend: {fix}"
