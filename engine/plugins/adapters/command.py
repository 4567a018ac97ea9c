"""`engine envs`: adapters, environments and tools, and what each needs."""

from __future__ import annotations

from engine.cli.options import Json
from engine.terminal import echo_json


def envs(
    as_json: Json = False,
) -> None:
    """List the adapters, environments, users, tools and scorers that a spec may name, and what each needs.

    Installed packages add theirs by entry points of the groups `episode_engine.environments`, `.users`, `.tools`,
    `.scorers`, `.adapters` and `.tool_adapters`; a spec writes their names.
    """
    from rich.table import Table

    from engine.console import make_console
    from engine.plugins.adapters.offered import offered

    offers = offered()
    if as_json:
        for item in offers:
            echo_json({name: getattr(item, name) for name in item.__slots__}, indent=None)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("kind", "name", "write", "needs", "from"):
        table.add_column(heading, overflow="fold")
    for item in offers:
        needs = (
            "nothing"
            if not item.needs
            else f"{', '.join(item.needs)}" + ("" if item.installed else f": {item.install}")
        )
        table.add_row(item.kind, item.name, item.use, needs, item.source)
    make_console().print(table)
