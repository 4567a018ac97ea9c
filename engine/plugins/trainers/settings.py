"""The settings of a trainer's configuration that an adapter refuses: tables, and their reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import TrainError

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

OFF = None
"""The values of a row whose setting must be off: absent, null, false, 0 or empty."""
Row = tuple[str, tuple[Any, ...] | None, str]
"""The dotted path of a setting, the values that it may have (None: absent or null), and why it may have no other."""


def value_of(config: Any, path: str, default: Any = None) -> Any:
    """A value of a trainer's configuration, by its dotted path; the default where it is absent or null."""
    for name in path.removeprefix("--").split("."):
        attribute = name.replace("-", "_")
        config = config.get(name) if hasattr(config, "get") else getattr(config, attribute, None)
    return default if config is None else config


def refuse(
    loaded: LoadedSpec, trainer: str, config: Any, table: Iterable[Row], conditions: Mapping[str, bool] | None = None
) -> None:
    """Refuse a configuration with other values than a table's, or in which one of the conditions holds.

    Raises:
        TrainError: kind `train_setup`; the message names all of them, each with what to change.
    """
    problems = []
    for path, values, why in table:
        value = value_of(config, path)
        if bool(value) if values is None else value not in values:
            problems.append(f"{path}{_shown(value)}: {why}")
    problems += [text for text, holds in (conditions or {}).items() if holds]
    if problems:
        raise TrainError(f"{loaded.path}: with {trainer}, change these: " + "; ".join(problems), kind="train_setup")


def _shown(value: Any) -> str:
    if value is None or value is False:
        return "=null" if value is None else "=false"
    return f"={value}" if value is not True and isinstance(value, str | int | float) else ""
