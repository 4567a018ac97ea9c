"""`engine plugins`: what is installed beside the core."""

from __future__ import annotations

from typing import Annotated

import typer

from engine.terminal import echo_json


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for programs.")] = False,
) -> None:
    """List the plugins: name, package, version, what each adds, and why one cannot be used.

    Exit status: 0, or 1 when a plugin cannot be used.
    """
    from engine.cli.console import make_console
    from engine.cli.exits import ERROR
    from engine.plugin import installed, names_of

    found = installed()
    if as_json:
        for name in [*found.plugins, *found.broken]:
            plugin = found.plugins.get(name)
            adds = {} if plugin is None else names_of(plugin)
            row = {"name": name, "package": found.packages.get(name), "adds": adds, "broken": found.broken.get(name)}
            echo_json(row, indent=None)
    else:
        from rich.table import Table

        table = Table("plugin", "package", "adds", box=None, pad_edge=False)
        for name, plugin in found.plugins.items():
            added = [f"{point} {', '.join(names)}" for point, names in names_of(plugin).items() if point != "install"]
            table.add_row(name, found.packages[name], "\n".join([plugin.about, *added]))
        for name, why in found.broken.items():
            table.add_row(name, found.packages.get(name), f"cannot be used: {why}")
        make_console().print(table)
    if found.broken:
        raise typer.Exit(ERROR)
