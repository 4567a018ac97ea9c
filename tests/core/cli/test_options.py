"""The command line as a whole: each command in its panel, shared options the same in all commands, `--version`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from typer.testing import CliRunner

from engine import __version__
from engine.cli import main, options

ORDER = (
    "--score", "--set", "--limit", "--runs", "--out", "--resume", "--format", "--json", "--import", "--keep-going", "--quiet",
)  # fmt: skip
"""The order of the options that several commands have; a command's own may stand between them."""
OWN = {
    "--out": {"export", "graph", "import verl"},  # a file
    "--limit": {"show"},  # episodes in a table
    "--resume": {"train"},  # a training
    "--import": {"validate"},  # of any code that the specs name
}
"""The commands in which an option of this name means something else."""


def commands(command: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(main.app)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}".lstrip())
    if not hasattr(command, "commands"):
        yield path, command


def shared() -> dict[str, tuple[str | None, str | None]]:
    """The options of `engine.cli.options`: name -> metavar and help."""
    return {
        option.opts[0]: (option.metavar, option.help)
        for _, command in commands()
        for option in command.params
        for alias in vars(options).values()
        if option.param_type_name == "option"
        and option.help in [getattr(item, "help", None) for item in get_args(alias)]
    }


def test_shared_options_have_one_name_and_help_in_all_commands() -> None:
    known = shared()
    assert set(known) == set(ORDER) - {"--format"}
    for path, command in commands():
        for option in command.params:
            name = option.opts[0]
            if name in known and path not in OWN.get(name, ()):
                assert (option.metavar, option.help) == known[name], path


def test_shared_options_stand_in_one_order() -> None:
    for path, command in commands():
        names = [option.opts[0] for option in command.params]
        names = [name for name in names if name in ORDER and path not in OWN.get(name, ())]
        assert names == sorted(names, key=ORDER.index), path


def test_each_command_of_the_engine_stands_in_a_panel() -> None:
    panels = {name: command.rich_help_panel for name, command in typer.main.get_command(main.app).commands.items()}  # type: ignore[attr-defined]
    assert panels == {name: panel for panel, names in main._PANELS.items() for name in names if name in panels}
    assert list(dict.fromkeys(panels.values())) == [panel for panel in main._PANELS if panel in panels.values()]


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"episode-engine {__version__}\n")


@pytest.mark.parametrize("words", [["--help", "--show-completion"], ["--show-completion", "--help"]])
def test_completion_is_shown_with_help_beside_it(words: list[str], tmp_path: Path) -> None:
    variables = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [part for word in words for part in ([word, "bash"] if word != "--help" else [word])]
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", *words], env=variables, capture_output=True, text=True, timeout=60
    )
    assert "COMP_WORDS" in done.stdout
    assert "Usage" not in done.stdout
