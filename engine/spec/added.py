"""What the sections of plugins mean for the other parts of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engine.plugin import Hook
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
    """Of a function that must be a coroutine function, because it is cancelled at a limit: what to do where it is none."""


class PlayedRole(Struct, frozen=True, kw_only=True):
    """A model that plays a part of an episode beside the policy."""

    name: str
    spec: RoleSpec
    blame: Blame
    kinds: str
    """How the kinds of its failures begin."""
    fields: tuple[str, ...] = ()
    """What its prompt may name; of users and judges the core knows it."""


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


def added_roles(spec: EpisodeSpec) -> dict[DataPath, PlayedRole]:
    """The models that sections of plugins name."""
    return {path: role for facts in spec_facts(spec) for path, role in facts.roles.items()}
