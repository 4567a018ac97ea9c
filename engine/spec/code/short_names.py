"""Short names of what installed packages offer: `environment: {use: vault}` instead of `use: "my_package.vault:Vault"`.

A package offers its parts by entry points of `GROUPS`. A name is replaced by its entry point when a spec is read, so
a stored run has the entry point. Only the metadata of packages is read; nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import EngineError
from engine.schemas.entry import installed_points
from engine.spec.text.diagnostic import DataPath

GROUPS: Mapping[str, str] = {
    "environment": "episode_engine.environments",
    "user": "episode_engine.users",
    "tool": "episode_engine.tools",
    "scorer": "episode_engine.scorers",
}
"""Kind -> the group of its entry points."""


class AmbiguousNameError(EngineError):
    """Two installed packages offer different things by one name."""

    kind = "entry_error"
    blame = "spec"


def names_of(kind: str) -> list[str]:
    """The names that installed packages offer for a kind."""
    group = GROUPS.get(kind)
    return [] if group is None else sorted(installed_points(group))


def entry_of(kind: str, name: str) -> str | None:
    """The entry point of a name; None if no installed package offers it.

    Raises:
        AmbiguousNameError: two packages offer it, with different entry points.
    """
    found = installed_points(GROUPS[kind]).get(name, {})
    if len(found) > 1:
        offers = ", ".join(f"`{value}` ({package})" for value, package in sorted(found.items()))
        raise AmbiguousNameError(
            f"several packages offer the {kind} `{name}`: {offers}; write one of these entry points"
        )
    return next(iter(found), None)


def write_out(data: Any) -> list[tuple[DataPath, str]]:
    """Replace the short names in a spec's document by their entry points, in place.

    Args:
        data: The document, not yet validated. Names that no package offers stay, and the rule `code.import` reports them.

    Returns:
        The problems: where, and what is wrong.
    """
    problems: list[tuple[DataPath, str]] = []
    for path, kind, owner in _owners(data):
        use = owner.get("use")
        if not isinstance(use, str) or ":" in use or owner.get("adapter") is not None:
            continue
        try:
            owner["use"] = entry_of(kind, use) or use
        except AmbiguousNameError as error:
            problems.append(((*path, "use"), str(error)))
    return problems


def _owners(data: Any) -> Iterator[tuple[DataPath, str, dict[str, Any]]]:
    """The mappings that may have a short name in `use`: path, kind and mapping."""
    if not isinstance(data, dict):
        return
    rewards, users, tools = data.get("rewards"), data.get("users"), data.get("tools")
    found: list[tuple[DataPath, str, Any]] = [
        (("environment",), "environment", data.get("environment")),
        (("user",), "user", data.get("user")),
        (("rewards", "scorer"), "scorer", rewards.get("scorer") if isinstance(rewards, dict) else None),
    ]
    found += [(("users", name), "user", user) for name, user in (users.items() if isinstance(users, dict) else ())]
    found += [(("tools", index), "tool", tool) for index, tool in enumerate(tools if isinstance(tools, list) else [])]
    yield from ((path, kind, owner) for path, kind, owner in found if isinstance(owner, dict))
