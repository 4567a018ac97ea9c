"""A run and an episode as HTML, which notebooks show.

Invariant: nothing of a run is written into the page unescaped, because a model wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.machine.machine import resolved_machine
from engine.masking import mask
from engine.plugin import loaded
from engine.runner.summary import label
from engine.terminal import visible

if TYPE_CHECKING:
    from engine.api.runs import Run, StoredEpisode

EPISODES = 5
"""Episodes whose turns are shown of a run."""
CHARACTERS = 200
"""Characters of a message that are shown of a run; of an episode all are."""


def run_html(run: Run) -> str:
    """A run: its sums, its machine where a plugin draws SVG, and the turns of its first finished episodes."""
    summary = run.summary
    outcomes = ", ".join(f"{name} {count}" for name, count in summary.outcomes.most_common())
    head = f"{run!r}: {summary.episodes} episodes, mean reward {summary.mean_reward:+.3f}; {outcomes}"
    finished = [episode for episode in run.episodes if episode.row.status == "done"][:EPISODES]
    turns = _table(("episode", *_COLUMNS), (row for episode in finished for row in _rows(episode, CHARACTERS)))
    return f"<div><p>{_text(head)}</p>{_machine(run)}{turns}</div>"


def episode_html(episode: StoredEpisode) -> str:
    """An episode: how it ended, and its turns."""
    outcome = "" if episode.row.status != "done" else f": {label(episode.trajectory.outcome)}"
    rows = _rows(episode, None) if outcome else ()
    return f"<div><p>{_text(f'{episode!r}{outcome}')}</p>{_table(('episode', *_COLUMNS), rows)}</div>"


_COLUMNS = ("turn", "reply", "event", "rewards")


def _rows(episode: StoredEpisode, most: int | None) -> Iterable[Sequence[str]]:
    replies = [message.text for message in episode.messages if message.role == "assistant"]
    replies = replies[len(replies) - len(episode.turns) :]  # examples in the prompt are no turns
    for turn, reply in zip(episode.turns, replies, strict=True):
        shown = reply if most is None or len(reply) <= most else f"{reply[:most]}…"
        rewards = ", ".join(f"{name} {value:+.3f}" for name, value in turn.rewards.items())
        yield episode.id, str(turn.index), shown, turn.event, rewards


def _machine(run: Run) -> str:
    draw = loaded("graph_formats").get("svg")
    try:
        return "" if draw is None else str(draw(resolved_machine(run.spec.spec), run.summary.transitions))
    except EngineError:  # it cannot be laid out, or needs a plugin that is gone
        return ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(text: str) -> str:
    return escape(visible(mask(text)))
