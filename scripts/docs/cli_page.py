"""docs/cli.md: every command with its arguments and options, from the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from engine.cli.main import app

HEAD = """\
# The command line

<!-- Written by `python scripts/docs` from the commands in engine/cli and engine/plugins. Edit those, then run it again. -->

`RUN` is a run's folder, its id, the beginning of its id, or `latest`. `show` and `view` take trainings too. `engine COMMAND --help` prints the same as this page.

"""


def cli_page() -> str:
    """Return the page: a table of all commands, and one section for each."""
    commands = dict(_commands(typer.main.get_command(app), "engine"))
    lines = ["| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {_first(command)} |" for name, command in commands.items()]
    return HEAD + "\n".join(lines) + "\n" + "".join(_section(name, command) for name, command in commands.items())


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in sorted(command.commands):
        yield from _commands(command.commands[name], f"{path} {name}")


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").split("\n\n")]


def _first(command: Any) -> str:
    return _cell(_paragraphs(command)[0])


def _section(name: str, command: Any) -> str:
    arguments = [option for option in command.params if option.param_type_name == "argument"]
    usage = " ".join([name, *(option.metavar or option.name.upper() for option in arguments)])
    lines = ["", f"## `{name}`", "", f"`{usage}`", "", *[f"{part}\n" for part in _paragraphs(command)]]
    options = [option for option in command.params if not option.hidden and option.name != "help"]
    if options:
        lines += [
            "| | |",
            "|---|---|",
            *(f"| `{_spelled(option)}` | {_cell(option.help or '')} |" for option in options),
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _spelled(option: Any) -> str:
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper())
    value = (option.metavar or "VALUE").strip("<>").replace("|", "\\|")
    return "`, `".join([*option.opts, *option.secondary_opts]) + ("" if option.is_flag else f" {value}")


def _cell(text: str) -> str:
    return re.sub(re.escape(str(Path.home())), "~", " ".join(text.split())).replace("|", "\\|")
