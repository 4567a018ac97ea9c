"""Describes the ledger of an episode for a terminal: all postings as a table, and who moved which reward, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from engine.schemas.reward import Posting


def moves(postings: Sequence[Posting]) -> dict[int, list[str]]:
    """Describe who moved or wrote which reward and why, one line each, by the turn that was newest when it happened.

    A transfer's postings are adjacent in the ledger and sum to zero: they become one line.
    """
    told: dict[int, list[str]] = {}
    moving: list[Posting] = []
    for posting in postings:
        lines = told.setdefault(posting.at_turn, [])
        if posting.op != "transfer":
            verb = "set" if posting.op == "set" else f"{posting.delta:+.3f}"
            value = f"{verb} to {posting.after:.3f}" if posting.op == "set" else verb
            lines.append(f"{posting.name} {value} on turn {posting.turn}{_by(posting)}")
            continue
        moving.append(posting)
        if abs(sum(item.delta for item in moving)) < 1e-9:
            lines.append(_moved(moving))
            moving = []
    if moving:
        told[moving[0].at_turn].append(_moved(moving))
    return told


def _moved(postings: Sequence[Posting]) -> str:
    """Describe one transfer."""
    first = postings[0]
    paid = sorted({posting.turn for posting in postings if posting.delta < 0})
    got = sorted({posting.turn for posting in postings if posting.delta > 0})
    amount = sum(posting.delta for posting in postings if posting.delta > 0)
    names = ", ".join(dict.fromkeys(posting.name for posting in postings))
    return f"{names} {amount:.3f} moved from {_turns(paid)} to {_turns(got)}{_by(first)}"


def _turns(turns: Sequence[int]) -> str:
    if not turns:
        return "no turn"
    return f"turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, turns))}"


def _by(posting: Posting) -> str:
    """Return the source and cause of a posting."""
    return f" · {posting.source}" + (f": {posting.cause}" if posting.cause else "")


def print_moves(console: Console, lines: Sequence[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for line in lines:
        console.print(Padding(Text(visible(f"⇄ {line}"), style="magenta"), (0, 0, 0, 2)))


def _place(posting: Posting) -> str:
    """The turn of a posting, and the part of it."""
    if posting.start is None:
        return str(posting.turn)
    part = f"tokens {posting.start} to {posting.end}" if posting.call is None else f"call {posting.call}"
    return f"{posting.turn}, {part}"


def ledger_table(postings: Sequence[Posting]) -> Table:
    """Return a table of all postings of the ledger: who moved what, when and why."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "#",
        "at turn",
        "turn",
        "reward",
        "did",
        "change",
        "holds",
        "by",
        "why",
        title="Rewards",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in (table.columns[5], table.columns[6]):
        column.justify = "right"
    for posting in postings:
        table.add_row(
            str(posting.seq),
            str(posting.at_turn),
            _place(posting),
            Text(visible(posting.name)),
            posting.op,
            Text(f"{posting.delta:+.3f}", style="green" if posting.delta > 0 else "red" if posting.delta < 0 else ""),
            f"{posting.after:.3f}",
            Text(visible(posting.source)),
            Text(visible(posting.cause)),
        )
    return table
