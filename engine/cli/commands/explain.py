"""`engine explain`: shows what a rule finds, why it matters, a bad example and a good one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from engine.terminal import echo

UNKNOWN = 2


def explain(
    rule: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="A rule's id, such as `machine.unreachable`; by default all rules are listed."
        ),
    ] = None,
) -> None:
    """Print the page of a rule: what it finds, why, a bad example and a good one."""
    from engine.validate.registry import page_ids, page_of

    ids = page_ids()
    if rule is None:
        width = max(map(len, ids), default=0)
        for name in ids:
            page = page_of(name)
            if page is not None:
                echo(f"{name:<{width}}  {page.severity:<7}  {page.about}")
        return
    page = page_of(rule.strip().strip("[]`"))
    if page is None:
        near = get_close_matches(rule, ids, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        echo(f"there is no rule `{rule}`{hint} (`engine explain` lists them all)", err=True)
        raise typer.Exit(UNKNOWN)
    echo(page.text.rstrip())
