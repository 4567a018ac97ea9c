"""What may change in the spec of a run or a training that is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from engine.plugin import installed
from engine.schemas.backend import backend_classes
from engine.schemas.sections import dump
from engine.store.header import differences

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


def resumable_keys() -> tuple[str, ...]:
    """Paths of values that a resume may change: those that a section or a backend names; `*` stands for any characters."""
    sections = (section for plugin in installed().plugins.values() for section in plugin.sections)
    keys = [section.path(key) for section in sections for key in section.resumable]
    of_backends = dict.fromkeys(key for backend in backend_classes() for key in backend.resumable)
    keys += [f"{place}backend.{key}" for key in of_backends for place in ("", "*.")]
    return tuple(pattern for key in keys for pattern in (key, f"{key}.*"))


def changes_of(before: EpisodeSpec, after: EpisodeSpec, allowed: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths of values that differ, and those of them that a resume may not change.

    Args:
        before: The spec with which it began.
        after: The spec of the resume.
        allowed: Paths that may change; `*` stands for any characters. One that begins with `*` allows nothing in a `with`,
            whose keys are those of the spec's code.
    """
    changed = sorted({path for path, _, _ in differences(dump(before), dump(after))})
    return changed, [path for path in changed if not any(_allows(pattern, path) for pattern in allowed)]


def _allows(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) and not (pattern.startswith("*") and "with" in path.split("."))
