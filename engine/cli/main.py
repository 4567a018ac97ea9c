"""`engine`: the command line. Each command's own imports happen when it is called."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any

import typer
import typer.core

from engine import plugin
from engine.cli.options import Json, with_options
from engine.terminal import brief, echo, echo_json

# Torch reads this when it is imported. Threads that spin while they wait make a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_COMPLETION = {"--install-completion", "--show-completion"}


class _Commands(typer.core.TyperGroup):
    """The commands. What is said of a wrong command line does not repeat a long argument.

    A command of a plugin that is not installed is refused with what to install.
    """

    def make_context(self, info_name: Any, args: list[str], *arguments: Any, **options: Any) -> Any:
        if _COMPLETION & set(args):  # typer would print the help, and install nothing
            args = [word for word in args if word != "--help"]
        return _briefly(super().make_context, info_name, args, *arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        return _briefly(super().invoke, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        unknown = [args[:2], args[:1]] if args and self.get_command(ctx, args[0]) is None else []
        for words in unknown:  # two words: a command of a group that is not there without its plugins
            path = " ".join([_path(ctx), *words]).strip()
            if why := plugin.missing("commands", path):
                echo(f"there is no command `{path}`: {why}", err=True)
                raise typer.Exit(2)
        return super().resolve_command(ctx, args)


def _briefly(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            echo(f"`{error.filename}` is too long for the name of a file or folder; give a shorter one", err=True)
            raise typer.Exit(2) from None
        if name := getattr(error, "option_name", None):  # an option of a plugin that is not there, or an old one
            option = f"{_path(error.ctx)} {name}"  # type: ignore[attr-defined]
            new = plugin.entries("old_options").get(option)
            words = (
                f"write `{new}`" if new else plugin.missing("old_options", option) or plugin.missing("options", option)
            )
            if words is not None:
                echo(f"there is no option `engine {option}`: {words}", err=True)
                raise typer.Exit(2) from None
        if isinstance(words := getattr(error, "message", None), str) and hasattr(error, "format_message"):
            error.message = brief(words)  # type: ignore[attr-defined]
        raise


def _path(context: Any) -> str:
    """The words of a command, without the program: `import verl`."""
    return str(context.command_path).removeprefix(context.find_root().command_path).strip()


app = typer.Typer(
    name="engine",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


_ABOUT = (
    "Declared multi-turn episodes for reinforcement learning, exact to the token.\n\n"
    "An episode is one YAML file: states, limits, tools, a user, rewards. Check it, run it, train on it:"
)
_EXAMPLES = (
    "engine new my-task",
    "engine validate specs/",
    "engine run specs/quickstart.yaml",
    "engine show latest",
    "engine view",
    "engine train specs/train_arithmetic.yaml",
    "engine export latest --format parquet",
)
"""Command lines in the help. One of a plugin that is not installed is left out."""
_PANELS = {
    "Begin": ("new", "envs", "models"),
    "Run": ("run", "eval", "replay", "rescore"),
    "Look": ("show", "view", "rate", "compare", "graph"),
    "Train": ("train", "plan", "compact"),
    "Check": ("validate", "explain", "test", "doctor", "template", "audit"),
    "Connect": ("export", "import", "serve", "schema", "plugins"),
}
"""The panels of the help, and the commands in each. Commands of other packages follow in a panel of their own."""


def _version(asked: bool) -> None:
    if asked:
        from engine import __version__

        echo(f"episode-engine {__version__}")
        raise typer.Exit


@app.callback()
def _of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `engine` itself."""


def plugins(
    as_json: Json = False,
) -> None:
    """List the plugins: name, package, version, what each adds, and why one cannot be used.

    Exit status: 0, or 1 when a plugin cannot be used.
    """
    from engine.cli.exits import ERROR
    from engine.console import make_console

    installed = plugin.installed()
    if as_json:
        for name in [*installed.plugins, *installed.broken]:
            face = installed.plugins.get(name)
            adds = {} if face is None else plugin.names_of(face)
            package, broken = installed.packages.get(name), installed.broken.get(name)
            echo_json({"name": name, "package": package, "adds": adds, "broken": broken}, indent=None)
    else:
        from rich.table import Table

        table = Table("plugin", "package", "adds", box=None, pad_edge=False)
        for name, face in installed.plugins.items():
            names = plugin.names_of(face).items()
            added = [f"{point} {', '.join(values)}" for point, values in names if point != "install"]
            table.add_row(name, installed.packages[name], "\n".join([face.about, *added]))
        for name, why in installed.broken.items():
            table.add_row(name, installed.packages.get(name), f"cannot be used: {why}")
        make_console().print(table)
    if installed.broken:
        raise typer.Exit(ERROR)


def _register() -> None:
    """Add the core's commands and those of plugins; `import NAME` goes into the group `import`, which is there if a
    plugin adds to it."""
    from engine.cli.export import export
    from engine.cli.run import run
    from engine.cli.train import train
    from engine.cli.validate.command import explain, validate

    core = (validate, explain, run, train, with_options("export", export), plugins)
    commands: dict[str, Callable[..., None]] = {command.__name__: command for command in core}
    commands |= plugin.loaded(
        "commands", list(commands), check=lambda _, command: None if callable(command) else "not a function"
    )
    panels = {name: panel for panel, names in _PANELS.items() for name in names}
    order = [*panels, *commands]
    groups = {"": app}
    for name in sorted(commands, key=lambda name: order.index(name.split()[0])):
        group, _, last = name.rpartition(" ")
        panel = panels.get(name.split()[0], "Others")
        if group not in groups:
            groups[group] = typer.Typer(cls=_Commands, help=plugin.COMMAND_GROUPS[group], no_args_is_help=True)
            groups[group].callback()(lambda: None)  # or one command would be the group itself
            app.add_typer(groups[group], name=group, rich_help_panel=panel)
        groups[group].command(last, rich_help_panel=panel)(commands[name])
    examples = [f"  {line}" for line in _EXAMPLES if line.split()[1] in commands]
    app.info.help = "\n\n".join([_ABOUT, *examples])


_register()


def main() -> None:
    """Entry point of the console script."""
    from engine.cli.exits import leave_hung_code_behind

    sys.excepthook = _print_traceback
    try:
        app()
    except SystemExit as leaving:
        code = leaving.code
        leave_hung_code_behind(code if isinstance(code, int) else 1 if code else 0)
        gc.freeze()  # Python looks for garbage a last time: not in all that was imported
        raise


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a defect, escaped, because its message may quote a model's text."""
    import traceback

    echo("".join(traceback.format_exception(kind, error, trace)), err=True, nl=False)


if __name__ == "__main__":
    main()
