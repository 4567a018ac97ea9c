"""The commands that are there: the core's tests hold without plugins too, and use the commands of those that are installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

from engine.cli.main import app

COMMANDS = frozenset(str(command.name) for command in app.registered_commands)

Words = TypeVar("Words", bound=Sequence[str])


def needs_command(name: str) -> pytest.MarkDecorator:
    """A test of a command that the core does not have."""
    return pytest.mark.skipif(name not in COMMANDS, reason=f"no plugin here adds `engine {name}`")


def installed(lines: Iterable[Words]) -> list[Words]:
    """The command lines whose command is there."""
    return [words for words in lines if words[0] in COMMANDS]


def installed_of(lines: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same of lines with names."""
    return {name: words for name, words in lines.items() if words[0] in COMMANDS}
