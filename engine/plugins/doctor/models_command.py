"""`engine models`: lists the model catalogue, and which models are in the cache."""

from __future__ import annotations

from engine.cli.options import JsonLines
from engine.terminal import echo_json


def models(
    as_json: JsonLines = False,
) -> None:
    """List the models of the catalogue, and which of them are in the cache.

    A spec can name each of them as `model.path`; the first run downloads it. Other models are named by
    a folder or a hub id.
    """
    from rich.table import Table

    from engine.cli.console import make_console
    from engine.tokens.catalogue import CATALOGUE, cache_root, cached

    rows = [(entry, cached(entry.name)) for entry in CATALOGUE.values()]
    if as_json:
        for entry, folder in rows:
            row = {
                "name": entry.name,
                "hub_id": entry.hub_id,
                "parameters": entry.parameters,
                "download_mb": entry.download_mb,
                "licence": entry.licence,
                "cached": None if folder is None else str(folder),
            }
            echo_json(row, indent=None)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "parameters", "download", "licence", "cached"):
        table.add_column(heading)
    for entry, folder in rows:
        here = (
            "no: the first run " + ("fetches it" if entry.download_mb else "makes it")
            if folder is None
            else str(folder)
        )
        download = f"{entry.download_mb} MB" if entry.download_mb else "none"
        table.add_row(entry.name, entry.parameters, download, entry.licence, here)
    console = make_console()
    console.print(table)
    console.print(f"Cache: {cache_root()} (EPISODE_ENGINE_CACHE moves it).")
