"""A simulated user that a model plays.

Each answer is a new request whose prompt has the visible text of the policy and the user: without the policy's system
prompt and few-shot examples, tool calls, tool results and any reasoning. If the spec has a grader, the grader decides by
rule first, and the model only writes the text.

Invariant: it keeps no state between answers, so a resume or a replay needs only the journal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.actions.calling.workers import call_spec_code, on_main_loop
from engine.episode.episode import derive_seed
from engine.errors import SpecCodeError
from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.template import fields_of, fill, own_spans

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.plugins.roles.models import RoleModel
    from engine.schemas.role import Mark, UserSpec

SILENCE = "(says nothing)"
"""Replaces a reply without text."""


class ModelUser:
    """One episode's user, played by a model.

    Args:
        spec: Its prompt, marks and limits.
        model: Returns the model; called for each answer, so that a replay needs no model.
        grader: A user that decides by rule first; None if the spec has none.
        workers: Run the grader.
    """

    def __init__(self, spec: UserSpec, model: Callable[[], RoleModel], grader: Any, workers: Workers) -> None:
        self._spec = spec
        self._model = model
        self._grader = grader
        self._workers = workers

    @on_main_loop
    async def respond(self, view: EpisodeView) -> UserTurn:
        """Ask the grader, then the model, and read the marks of its reply.

        Raises:
            SpecCodeError: the model or the grader failed; the blame is the user's.
        """
        verdict = await self._verdict(view)
        if verdict.satisfied:
            return verdict
        model = self._model()
        words = verdict.content if isinstance(verdict.content, str) else ""
        fields = self._fields(view, words)
        said = await model.reply(
            self.prompt(view, words),
            intended=[own_spans(item.content, fields) for item in self._spec.prompt],
            episode_id=view.episode_id,
            turn=view.user_turn,
            seed=derive_seed(view.seed, model.name, view.user_turn),
        )
        turn = read_marks(said.text, self._spec.marks)
        return verdict.model_copy(
            update={
                "content": turn.content,
                "satisfied": turn.satisfied,
                "solved": verdict.solved or turn.solved,
                "rewards": [*verdict.rewards, *turn.rewards],
                "facts": {**verdict.facts, **turn.facts},
                "tokens": said.tokens,
                "recover": None,
            }
        )

    async def _verdict(self, view: EpisodeView) -> UserTurn:
        """The grader's turn; an empty turn if there is no grader."""
        if self._grader is None:
            return UserTurn()
        assert self._spec.grader is not None
        what = f"`{self._spec.grader.use}`.respond"
        turn = await call_spec_code(
            self._workers,
            self._grader.respond,
            view,
            seconds=self._spec.seconds,
            blame="user",
            what=what,
            effects=self._spec.effects,
        )
        if not isinstance(turn, UserTurn):
            raise SpecCodeError(
                f"{what} returned {type(turn).__name__}; it must return a UserTurn", blame="user", kind="user_bad_reply"
            )
        return turn

    def prompt(self, view: EpisodeView, verdict: str = "") -> list[Message]:
        """The model's prompt: the spec's prompt and, if that names neither dialogue nor reply, the dialogue with swapped roles."""
        dialogue = dialogue_of(view)
        fields = self._fields(view, verdict)
        told = [Message(role=item.role, content=fill(item.content, fields)) for item in self._spec.prompt]
        named = {name for item in self._spec.prompt for name in fields_of(item.content)}
        if named & {"reply", "dialogue"}:
            return told
        return [*told, *_changed_over(dialogue, self._spec.opener)]

    @staticmethod
    def _fields(view: EpisodeView, verdict: str) -> dict[str, Any]:
        return {
            "task": view.task.fields,
            "reply": view.reply or SILENCE,
            "dialogue": "\n\n".join(f"{_WHO[role]}: {text}" for role, text in dialogue_of(view)),
            "verdict": verdict,
            "turn": view.user_turn,
        }


_WHO = {"user": "User", "assistant": "Assistant"}


def dialogue_of(view: EpisodeView) -> list[tuple[str, str]]:
    """(role, text) of the visible messages of the episode, from the last message before its first turn.

    Consecutive messages of one role are joined; an empty assistant message gets a placeholder where the user is to answer it.
    """
    messages = list(view.messages)
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    first = replies[len(replies) - (view.turn + 1)] if view.turn >= 0 and len(replies) > view.turn else len(messages)
    start = first
    while start > 0 and messages[start - 1].role == "user":
        start -= 1
    said: list[tuple[str, str]] = []
    for message in messages[start:]:
        text = message.text.strip()
        if message.role not in _WHO or not text:
            continue
        if said and said[-1][0] == message.role:
            said[-1] = (message.role, f"{said[-1][1]}\n\n{text}")
        else:
            said.append((message.role, text))
    if view.turn >= 0 and (not said or said[-1][0] != "assistant"):
        said.append(("assistant", SILENCE))
    return said


def _changed_over(dialogue: Sequence[tuple[str, str]], opener: str) -> list[Message]:
    """The dialogue from the view of the user's model: the policy has the role `user` and speaks first."""
    turned = [Message(role="user" if role == "assistant" else "assistant", content=text) for role, text in dialogue]
    if turned and turned[0].role == "assistant":
        turned.insert(0, Message(role="user", content=opener))
    return turned


def read_marks(text: str, marks: Sequence[Mark]) -> UserTurn:
    """Separate the text of a reply, which the policy sees, from its marks, which the engine reads.

    Raises:
        SpecCodeError: the number of a mark is invalid.
    """
    satisfied = solved = False
    rewards: list[RewardEvent] = []
    facts: dict[str, Any] = {}
    for mark in marks:
        pattern = re.compile(mark.pattern if mark.pattern is not None else re.escape(mark.text or ""))
        found = pattern.search(text)
        if found is None:
            continue
        satisfied |= mark.satisfied
        solved |= mark.solved
        rewards += mark.rewards
        facts.update(mark.facts)
        if mark.reward is not None:
            cause = f"the user's model says {found[0]}"
            rewards.append(RewardEvent(name=mark.reward, value=_number(found[1]), cause=cause))
        text = pattern.sub("", text)
    return UserTurn(content=text.strip(), satisfied=satisfied, solved=solved, rewards=rewards, facts=facts)


def _number(text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise SpecCodeError(
            f"the user's model gave {text!r} in a mark; it must give a number", blame="user", kind="user_bad_reply"
        )
    return value
