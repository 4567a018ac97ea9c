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
    rows = [
        {
            "name": name,
            "package": found.packages.get(name, ""),
            "about": found.plugins[name].about if name in found.plugins else "",
            "adds": names_of(found.plugins[name]) if name in found.plugins else {},
            "broken": found.broken.get(name),
        }
        for name in [*found.plugins, *found.broken]
    ]
    if as_json:
        for row in rows:
            echo_json(row, indent=None)
    else:
        from rich.table import Table

        table = Table("plugin", "package", "adds", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row["name"], row["package"], row["broken"] and f"cannot be used: {row['broken']}" or _adds(row))
        make_console().print(table)
    if found.broken:
        raise typer.Exit(ERROR)


def _adds(row: dict[str, object]) -> str:
    adds = row["adds"]
    assert isinstance(adds, dict)
    return "; ".join([str(row["about"]), *(f"{point}: {', '.join(names)}" for point, names in adds.items() if point != "install")])
