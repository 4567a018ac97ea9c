"""`engine view`: shows runs and trainings in a browser, or writes them to one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Imports, RunsFolder, only_looks
from engine.terminal import echo

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing

MOST_RUNS = 200
"""Maximum number of runs and trainings that are shown if none is named."""


@only_looks
def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]…",
            help="Folders or ids of runs and trainings, the beginning of an id, or `latest`. Default: the newest 200 "
            "of --out, also those that begin later.",
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
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of 127.0.0.1. Default: one that follows from --out, so that links last; 0: a free one, with a "
            "new token.",
        ),
    ] = None,
    out: RunsFolder = Path("runs"),
    imports: Imports = None,
) -> None:
    """Look at episodes in a browser: transcript, rewards and who moved them, tokens, branches, machine, timings.

    The app is reachable from this machine alone, at an address with a token that only you can read. Links to its
    pages have no token and last over restarts. It reads, also runs and trainings that are still going on, and
    writes nothing but what you say about an episode. Ctrl-C ends it.
    """
    from engine.plugins.show.listing.listing import Listing
    from engine.plugins.show.listing.sources import find

    with errors_exit(USAGE):
        if export is None and (filter or text):
            raise typer.BadParameter("--filter and --text belong to --export; in the app they are fields of the list")
        with Listing([find(run, out) for run in runs or ()]) as listing:
            if not runs:
                _add_newest(listing, out)
            if export is not None:
                _export(listing, export, filter, text, max_size)
            else:
                _serve(listing, out, not runs, port, browser)


def _serve(listing: Listing, out: Path, all_runs: bool, port: int | None, browser: bool) -> None:
    try:
        from engine.plugins.view.documents import Documents
        from engine.plugins.view.home import newest
        from engine.plugins.view.web import new_token, open_place, serve, stored_token
    except ModuleNotFoundError as error:
        wrong_usage(f"`engine view` needs the package {error.name}: pip install 'episode-engine[view]'")

    def ready(address: str) -> None:
        echo(f"{address}\nCtrl-C ends it.")
        if browser:
            import webbrowser

            webbrowser.open(address)

    documents = Documents(listing, lambda: newest(out, MOST_RUNS)[0] if all_runs else (), out)
    serve(documents, open_place(port, out), stored_token() if port != 0 else new_token(), ready)


def _export(listing: Listing, file: Path, filter: str | None, text: str | None, max_size: str) -> None:
    from engine.plugins.view.single_file import SingleFile
    from engine.schemas.base import parse_bytes

    try:
        limit = int(parse_bytes(max_size))
    except ValueError as error:
        raise typer.BadParameter(f"--max-size: {error}") from None
    written = SingleFile(listing, filter or "", text or "", limit)
    written.write(file)
    echo(f"{file}: {len(written.rows)} of {written.chosen} episodes, {file.stat().st_size / 1e6:.1f} MB")
    for line in written.left_out:
        echo(f"left out: {line}", err=True)


def _add_newest(listing: Listing, out: Path) -> None:
    """Add the newest runs and trainings of a folder that can be read.

    Raises:
        StoreError: there are none.
    """
    from engine.errors import StoreError
    from engine.plugins.view.home import newest

    folders, older = newest(out, MOST_RUNS)
    problems = listing.add(folders)
    if older:
        problems.append(f"{older} older runs in {out}; name those that are to be shown")
    for problem in problems:
        echo(f"not shown: {problem}", err=True)
    if not listing.sources and not listing.trainings:
        raise StoreError(f"there are no runs in {out} that can be read; `engine run SPEC` makes one")
