"""`ask_user`: asks the (simulated) user for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.actions.action import BuiltInAction, EpisodeObjects, bounds_of, post_rewards
from engine.actions.calling.workers import call_spec_code
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.limit import Limit
from engine.schemas.environment import UserTurn
from engine.schemas.journal import UserRecord
from engine.schemas.message import ContentPart, Message
from engine.spec.template import fill_words

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class AskUserAction(BuiltInAction):
    """Ask the user; if the newest reply cannot be parsed, answer in the user's place with an error text."""

    name = "ask_user"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._people = loaded.spec.users_by_name
        self._recover = loaded.spec.recover
        self._bounds_with = {name: bounds_of(self.name, loaded.spec, user) for name, user in self._people.items()}

    def limit(self, episode: Episode, bounds: Sequence[tuple[Limit, float]] | None = None) -> tuple[str, float] | None:
        """Return the first limit that is reached: of the spec, then of the episode's user."""
        return super().limit(episode, self._bounds_with.get(episode.task.user or "", bounds))

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> UserRecord:
        """Return the user's answer, or the engine's own answer to a reply that cannot be parsed.

        Raises:
            SpecCodeError: the spec has no user, or the user failed or returned an invalid answer.
        """
        if episode.reply.malformed:
            return UserRecord(turn=UserTurn(content=self._malformed(episode)), canned=True)
        user = self._people.get(objects.user_name)
        if user is None:
            raise SpecCodeError("the user is asked, but the spec has none", blame="spec", kind="no_user")
        who = f"`{user.use}`.respond" if user.use else "the model that plays the user"
        turn = await call_spec_code(
            self._code,
            objects.user.respond,
            episode.view(),
            seconds=None if user.model_played else user.seconds,  # the deadline of a model begins with its request
            blame="user",
            what=who,
            effects=user.effects,
        )
        if not isinstance(turn, UserTurn):
            raise SpecCodeError(
                f"{who} returned {type(turn).__name__}; it must return a UserTurn",
                blame="user",
                kind="user_bad_reply",
            )
        if not isinstance(turn.content, str | list):  # built without validation
            raise SpecCodeError(
                f"{who} returned content of type {type(turn.content).__name__}; it must be a string or a list of parts",
                blame="user",
                kind="user_bad_reply",
            )
        if not turn.satisfied and not turn.content:
            raise SpecCodeError(
                f"{who} returned neither content nor `satisfied`; the policy would be shown nothing",
                blame="user",
                kind="user_bad_reply",
            )
        return UserRecord(turn=self._in_the_specs_words(turn, episode))

    def _malformed(self, episode: Episode) -> list[ContentPart]:
        attempts = episode.reply.malformed
        fields = {
            "problem": " ".join(attempt.problem for attempt in attempts),
            "raw": "\n".join(attempt.raw for attempt in attempts),
            "task": episode.task.fields,
        }
        return fill_words(self._recover.malformed, fields, self._loaded.base)

    def _in_the_specs_words(self, turn: UserTurn, episode: Episode) -> UserTurn:
        """Return the turn with the spec's text for the problem of the reply, if there is one."""
        words = getattr(self._recover, turn.recover) if turn.recover and not turn.satisfied else None
        if words is None:
            return turn
        said = fill_words(words, {**turn.fields, "task": episode.task.fields}, self._loaded.base)
        return turn.model_copy(update={"content": said})

    def apply(self, episode: Episode, record: UserRecord) -> str:
        """Add the user's message to the conversation, and write its rewards and facts."""
        turn = record.turn
        episode.counts.user_turns += 1
        episode.counts.user_tokens += turn.tokens
        episode.feedback = {
            **turn.facts,
            "solved": turn.solved,
            "satisfied": turn.satisfied,
            "malformed": record.canned,
        }
        episode.facts.update(turn.facts)
        episode.solved = episode.solved or turn.solved
        if turn.content:
            episode.conversation.add([Message(role="user", content=turn.content)])
        post_rewards(episode, turn.rewards, "user")
        return "satisfied" if turn.satisfied else "feedback"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the user's effects; `pure` if the reply cannot be parsed, because the user is not called."""
        user = self._people.get(objects.user_name)
        return "pure" if episode.reply.malformed or user is None else user.effects
