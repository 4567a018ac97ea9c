"""`check_sums`: works out the sums in the newest reply.

`perform` finds and checks them, and its record holds the result; `apply` only writes what the record says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.actions.action import Action, EpisodeObjects, post_rewards
from engine.actions.calling.code_call import call_spec_code
from engine.episode.episode import Episode
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from sum_check.facts import ACTION, SECONDS
from sum_check.record import SumCheckRecord
from sum_check.spec import SumCheckSpec
from sum_check.sums import CheckedSum, checked_sums

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class CheckSumsAction(Action):
    """Ends with `right`, `wrong`, or `unchecked` if the reply has no sum that can be worked out."""

    name = ACTION

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._spec = SumCheckSpec.or_default(loaded.spec)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> SumCheckRecord:
        """Check the sums, in a thread, because a long reply would block the other episodes."""
        sums: list[CheckedSum] = await call_spec_code(
            self._code,
            checked_sums,
            episode.reply.text,
            seconds=SECONDS,
            blame="environment",
            what="the check of sums",
        )
        if not sums:
            return SumCheckRecord()
        wrong = [each for each in sums if not each.right]
        reward = RewardEvent(
            name="sums",
            value=self._spec.wrong if wrong else self._spec.right,
            cause=f"{len(wrong)} of {len(sums)} sums wrong",
        )
        return SumCheckRecord(sums=sums, messages=_told(wrong), rewards=[reward])

    def apply(self, episode: Episode, record: SumCheckRecord) -> str:
        """Add the message and write the reward."""
        episode.conversation.add(list(record.messages))
        post_rewards(episode, record.rewards, ACTION)
        return record.event


def _told(wrong: Sequence[CheckedSum]) -> list[Message]:
    """The message to the model about its wrong sums."""
    lines = [f"`{each.text}` is wrong: the left side is {each.value}." for each in wrong]
    return [Message(role="user", content="\n".join([*lines, "Write your answer again."]))] if wrong else []
