"""`engine doctor`: whether this machine can run a spec, and what to install or change. `engine models`: the catalogue,
and which models are in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.cli.exits import ERROR, errors_exit
from engine.cli.options import Json, Overrides
from engine.terminal import echo_json

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(help="The spec to run here. Without it only the machine is checked.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check torch, CUDA, cuDNN, SGLang, ports, shared memory and disk, before a run.

    Exit status: 0 without errors, 1 with some or when the spec is invalid.
    """
    from rich.table import Table
    from rich.text import Text

    from engine.console import make_console
    from engine.plugins.doctor.examine import examine
    from engine.spec.load import load_spec

    with errors_exit(ERROR):
        loaded = None if spec is None else load_spec(spec, overrides or [])
    results = examine(loaded)
    if as_json:
        for result in results:
            echo_json(result._asdict(), indent=None)
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for result in results:
            word, colour = _MARKS[result.level]
            table.add_row(Text(word, style=colour), result.about, Text(result.text))
            if result.fix:
                table.add_row("", "", Text(f"→ {result.fix}"))
        make_console().print(table)
    if any(result.level == "error" for result in results):
        raise typer.Exit(ERROR)


def models(
    as_json: Json = False,
) -> None:
    """List the models of the catalogue, and which of them are in the cache.

    A spec can name each of them as `model.path`; the first run downloads it. Other models are named by
    a folder or a hub id.
    """
    from rich.table import Table

    from engine.console import make_console
    from engine.tokens.catalogue import cache_root, cached, named_models

    rows = [(entry, cached(entry.name)) for entry in named_models().values()]
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
