"""A run's conversations as the messages that a chat template of transformers is given, with what that form cannot hold.

    texts = RunTexts(store, template, losses)
    prompt, reply, images = texts.turn(trajectory, 2)

Invariant: the messages are those that the engine's own chat format gave the template: calls as calls or as they were written, tool
results in the role that the spec sets. What they cannot hold is counted in `Losses`, never left out silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import RenderError
from engine.store.shown_messages import reply_numbers, shown_messages
from engine.tokens.tokenizer import MARK, unquote

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.tokens.template import ChatTemplate

View = dict[str, Any]


@dataclass
class Losses:
    """What a data set does not carry, counted."""

    counts: Counter[str] = field(default_factory=Counter)
    """Number of things by what they are."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of things that have no row, by what they are."""

    def lines(self) -> list[str]:
        """One line for each, in a fixed order."""
        lost = [f"not carried: {count} {what}" for what, count in sorted(self.counts.items()) if count]
        return lost + [f"left out: {count} {what}" for what, count in sorted(self.left_out.items()) if count]


@dataclass(frozen=True)
class ShownTurn:
    """A reply and what the model was shown before it."""

    prompt: list[View]
    reply: View
    images: list[str]
    """Digests of the images of the prompt, in order."""
    whole: bool
    """Whether the reply ended by itself and all of it is in `reply`: no call was malformed, and it was not cut short."""


class RunTexts:
    """Makes messages of one run's episodes.

    Args:
        store: The run.
        template: The chat template of its model.
        losses: Counts what cannot be carried.
    """

    def __init__(self, store: RunReader, template: ChatTemplate, losses: Losses) -> None:
        self._template = template
        self._losses = losses
        self._tools = store.tool_schemas()
        self._known: tuple[str, dict[int, View]] = ("", {})

    def tools(self, trajectory: Trajectory) -> list[View]:
        """The schemas of the tools that the model was shown, as the run's folder has them."""
        schemas: list[View] = json.loads(self._tools(trajectory.episode_id) or "[]")
        return schemas

    def turn(self, trajectory: Trajectory, turn: Turn) -> ShownTurn:
        """One reply with its prompt."""
        if self._known[0] != trajectory.episode_id:
            self._known = (trajectory.episode_id, {})
        messages, numbers = shown_messages(trajectory, turn.index)
        turn_of = {at: number for number, at in enumerate(reply_numbers(trajectory))}
        views = [
            self._reply(trajectory, turn_of[number]) if number in turn_of else self._view(message)
            for message, number in zip(messages, numbers, strict=True)
        ]
        images = [part.image for message in messages[:-1] for part in message.images]
        whole = turn.event != "malformed" and turn.finish.type == "stop"
        return ShownTurn(views[:-1], views[-1], images, whole)

    def opening(self, trajectory: Trajectory) -> tuple[list[View], list[str]]:
        """What the model was shown before its first reply, with the digests of the images."""
        if trajectory.turns:
            first = self.turn(trajectory, trajectory.turns[0])
            return first.prompt, first.images
        shown = trajectory.messages
        return [self._view(message) for message in shown], [part.image for message in shown for part in message.images]

    def same_ids(self, trajectory: Trajectory, turn: Turn, shown: ShownTurn, tools: Sequence[View]) -> bool:
        """Whether the template writes the prompt and the reply of a turn with the ids of the run. Not for images."""
        branch = trajectory.branches[turn.branch]
        ids = branch.input_ids
        try:
            prompt = self._template.render_views(shown.prompt, list(tools) or None)
            whole = self._template.render_views([*shown.prompt, shown.reply], list(tools) or None)
        except RenderError:
            return False
        shown_ids: list[int] = ids[: turn.end].tolist()
        return prompt == shown_ids[: turn.start] and whole[: turn.end] == shown_ids

    def _reply(self, trajectory: Trajectory, number: int) -> View:
        known = self._known[1]
        if number not in known:
            turn = trajectory.turns[number]
            message = trajectory.messages[reply_numbers(trajectory)[number]]
            known[number] = self._sampled(trajectory, turn) if turn.end > turn.start else self._view(message)
        return known[number]

    def _sampled(self, trajectory: Trajectory, turn: Turn) -> View:
        ids = trajectory.branches[turn.branch].input_ids
        tools = self.tools(trajectory)
        parsed = self._template.replies.parse(
            ids[turn.start : turn.end], before=ids[: turn.start], turn=turn.index, tools=tools
        )
        return self._plain(self._template.views.of_reply(parsed, ids[turn.start : turn.end]))

    def _view(self, message: Message) -> View:
        try:
            view = self._template.views.of(message)
        except RenderError:  # the run's backend was shown more than this template can show
            self._losses.counts["messages that the chat template cannot show in full"] += 1
            view = {"role": message.role, "content": message.text}
        return self._plain(view)

    def _plain(self, view: View) -> View:
        """The view without the engine's marks: text that only spells a special token becomes that token elsewhere."""
        marked = _has_mark(view)
        if not marked:
            return view
        self._losses.counts[
            "messages whose text spells special tokens, which the trainer's tokenizer reads as tokens"
        ] += 1
        plain: View = _unquoted(view)
        return plain


def _has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, Mapping):
        return any(_has_mark(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_mark, value))


def _unquoted(value: Any) -> Any:
    if isinstance(value, str):
        return unquote(value)
    if isinstance(value, Mapping):
        return {_unquoted(key): _unquoted(item) for key, item in value.items()}
    return [_unquoted(item) for item in value] if isinstance(value, list) else value
