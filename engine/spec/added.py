"""What the sections of plugins mean for the other parts of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.plugin import Hook
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.text.diagnostic import DataPath


class Called(NamedTuple):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFacts:
    """What the section of a plugin means for other parts."""

    called: tuple[Called, ...] = ()
    """Functions that it names."""
    one_process: tuple[tuple[str, DataPath, str], ...] = ()
    """Why several drivers cannot run the spec: a message, its place, and what to do."""


SPEC_FACTS: Hook[Callable[[EpisodeSpec], SpecFacts]] = Hook("spec_facts")


def spec_facts(spec: EpisodeSpec) -> list[SpecFacts]:
    """The facts of each plugin whose section a spec has."""
    return [facts(spec) for facts in SPEC_FACTS.all(written(spec))]
