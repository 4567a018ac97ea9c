"""`engine view`: shows runs and trainings in a browser, or writes them to one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Imports, Port, RunsFolder, only_looks
from engine.terminal import echo

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing

MOST_RUNS = 20
"""Number of runs that are shown if none is named."""


@only_looks
def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]…",
            help="Folders or ids of runs and trainings, the beginning of an id, or `latest`. Default: the newest 20 of "
            "--out.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the address in the browser.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one file that needs no server, and end.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(metavar="CEL", help="With --export: only episodes for which this holds, as in `engine show`."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="With --export: only episodes in which this was said.")] = None,
    max_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="With --export: maximum size of the file; episodes that do not fit are left out."
        ),
    ] = "50MB",
    port: Port = 0,
    out: RunsFolder = Path("runs"),
    imports: Imports = None,
) -> None:
    """Look at episodes in a browser: transcript, rewards and who moved them, tokens, branches, machine, timings.

    The app is reachable from this machine alone, at an address with a random token. It only reads, also runs and
    trainings that are still going on. Ctrl-C ends it.
    """
    from engine.plugins.show.listing.listing import Listing
    from engine.plugins.show.listing.sources import find

    with errors_exit(USAGE):
        if export is None and (filter or text):
            raise typer.BadParameter("--filter and --text belong to --export; in the app they are fields of the list")
        paths = [find(run, out) for run in runs] if runs else _newest(out)
        with Listing(paths) as listing:
            if export is not None:
                _export(listing, export, filter, text, max_size)
            else:
                _serve(listing, port, browser)


def _serve(listing: Listing, port: int, browser: bool) -> None:
    try:
        from engine.plugins.view.web import serve
    except ModuleNotFoundError as error:
        wrong_usage(f"`engine view` needs the package {error.name}: pip install 'episode-engine[view]'")

    def ready(address: str) -> None:
        echo(f"{address}\nCtrl-C ends it.")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(listing, port, ready)


def _export(listing: Listing, file: Path, filter: str | None, text: str | None, max_size: str) -> None:
    from engine.plugins.view.single_file import write_file
    from engine.schemas.base import parse_bytes

    try:
        limit = int(parse_bytes(max_size))
    except ValueError as error:
        raise typer.BadParameter(f"--max-size: {error}") from None
    written = write_file(listing, file, filter or "", text or "", limit)
    echo(f"{file}: {len(written.rows)} of {written.chosen} episodes, {file.stat().st_size / 1e6:.1f} MB")
    for line in written.left_out:
        echo(f"left out: {line}", err=True)


def _newest(out: Path) -> list[Path]:
    """Return the newest runs and trainings of a folder that can be read.

    Raises:
        StoreError: there are none.
    """
    from engine.errors import EngineError, StoreError
    from engine.plugins.show.listing.sources import open_stores
    from engine.store.find import list_runs
    from engine.store.training import trainings

    folders = sorted({*list_runs(out), *trainings(out)}, key=lambda folder: folder.stat().st_mtime, reverse=True)
    usable: list[Path] = []
    problems: list[str] = []
    for folder in folders[:MOST_RUNS]:
        try:
            open_stores([folder])
            usable.append(folder)
        except EngineError as error:
            problems.append(str(error))
    if len(folders) > MOST_RUNS:
        problems.append(f"{len(folders) - MOST_RUNS} older runs in {out}; name those that are to be shown")
    for problem in problems:
        echo(f"not shown: {problem}", err=True)
    if not usable:
        raise StoreError(f"there are no runs in {out} that can be read; `engine run SPEC` makes one")
    return usable
