"""The tokens of an episode on a terminal: `engine show RUN EPISODE --tokens`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from engine.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

    from engine.store.reader import RunReader


def token_documents(store: RunReader, episode_id: str, *, finished: bool) -> list[dict[str, Any]]:
    """Return the columns of each branch of an episode as JSON; of an unfinished one, its sampled tokens.

    Raises:
        StoreError: a record is damaged.
    """
    from engine.plugins.show.listing.episode import plain

    return [
        {name: plain(value.tolist()) if hasattr(value, "tolist") else plain(value) for name, value in columns.items()}
        for columns in _columns(store, episode_id, finished=finished)
    ]


def _columns(store: RunReader, episode_id: str, *, finished: bool) -> list[dict[str, Any]]:
    from engine.plugins.show.listing.tokens import sampled_columns, token_columns

    if not finished:
        return [sampled_columns(store, episode_id)]
    return [token_columns(store, episode_id, branch.index) for branch in store.trajectory(episode_id).branches]


def print_tokens(console: Console, store: RunReader, episode_id: str, *, finished: bool) -> None:
    """Print a table for each branch: a line for each sampled token, and a line for each part that the model did not sample.

    Raises:
        StoreError: a record is damaged.
    """
    for columns in _columns(store, episode_id, finished=finished):
        console.print()
        _print_branch(console, columns)


def _print_branch(console: Console, columns: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    name = "Sampled tokens" if columns["branch"] < 0 else f"Branch {columns['branch']}"
    table = Table(
        "#", "turn", "mask", "id", "token", "log-prob", "advantage", "version",
        title=f"{name}: {len(columns['ids'])} tokens", title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for at in (0, 1, 2, 3, 5, 6, 7):
        table.columns[at].justify = "right"
    texts, advantages = columns["texts"], columns["advantages"]
    kinds = {at: kind for kind, start, end in columns["kinds"] for at in range(start, end)}
    for (mask, kind), group in groupby(
        range(len(columns["ids"])), lambda at: (int(columns["mask"][at]), kinds.get(at, ""))
    ):
        places = list(group)
        if not mask:
            part = "".join(texts[at] for at in places) if texts is not None else ""
            shown = f"{kind}: {_quoted(part)}" if part else kind
            table.add_row(
                "–".join(map(str, dict.fromkeys((places[0], places[-1])))),
                "",
                "0",
                "",
                Text(shown, style="dim"),
                "",
                "",
                "",
            )
            continue
        for at in places:
            table.add_row(
                str(at),
                str(columns["turns"][at]),
                "1",
                str(columns["ids"][at]),
                Text(_quoted(texts[at]) if texts is not None else ""),
                f"{columns['logprobs'][at]:.4f}",
                "" if advantages is None else f"{advantages[at]:+.4f}",
                str(columns["versions"][at]),
            )
    console.print(table)
    if columns["problem"]:
        console.print(f"no texts: {columns['problem']}", style="yellow")
    if columns["missing"]:
        console.print(f"no advantages: {columns['missing']}", style="yellow")


def _quoted(text: str, most: int = 60) -> str:
    """A text on one line, in quotes; a long one with its middle left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return visible(f"'{text}'".replace("\n", "\\n").replace("\t", "\\t"), newlines=False)
