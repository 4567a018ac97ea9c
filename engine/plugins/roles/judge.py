"""The model-played judge: it gives an episode its final rewards.

Invariant: the judge sees the task and the policy's replies, and nothing that a user, a tool or the environment
returned, so none of that is graded as the policy's. If no score can be parsed, the judge is asked again, and then
fails; it is never a score of zero.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.actions.reward_source import JUDGE, RewardSource, graded
from engine.episode.episode import Episode, derive_seed
from engine.errors import SpecCodeError
from engine.plugins.roles.models import RoleModels
from engine.schemas.environment import EpisodeView
from engine.schemas.journal import ScoreRecord
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.template import fill, own_spans

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.plugins.roles.models import RoleModel
    from engine.schemas.role import ScorerSpec
    from engine.spec.load import LoadedSpec


class Judge(RewardSource):
    """The judge of all episodes; it has no state per episode."""

    order, source, blame = JUDGE, "judge", "spec"

    def __init__(self, spec: ScorerSpec) -> None:
        self._spec = spec
        self._pattern = re.compile(spec.pattern)

    async def rewards(self, episode: Episode, objects: EpisodeObjects) -> ScoreRecord:
        """Judge the last reply, or each reply, in order.

        Raises:
            SpecCodeError: the judge's model failed, or none of its replies holds a number on the scale.
        """
        model = objects.part(RoleModels).model("rewards", "scorer")
        view = graded(episode.view())
        turns = range(view.turn + 1) if self._spec.turns == "each" else [view.turn]
        replies = view.replies
        judged = await asyncio.gather(*(self._judge(view, model, replies[: turn + 1]) for turn in turns))
        return ScoreRecord(rewards=[reward for reward, _ in judged], replies=[said for _, said in judged])

    async def _judge(self, view: EpisodeView, model: RoleModel, replies: Sequence[str]) -> tuple[RewardEvent, str]:
        """The reward of the newest of `replies`, and the judge's reply."""
        turn = len(replies) - 1
        fields = {
            "task": view.task.fields,
            "reply": replies[-1],
            "replies": "\n\n".join(f"Reply {index}:\n{text}" for index, text in enumerate(replies, start=1)),
            "turn": turn,
        }
        prompt = [Message(role=item.role, content=fill(item.content, fields)) for item in self._spec.prompt]
        intended = [own_spans(item.content, fields) for item in self._spec.prompt]
        said = ""
        for attempt in range(self._spec.tries):
            seed = derive_seed(view.seed, model.name, turn, attempt)
            reply = await model.reply(prompt, episode_id=view.episode_id, turn=turn, seed=seed, intended=intended)
            said = reply.text
            number = self.read(said)
            if number is not None:
                low, high = self._spec.scale
                cause = f"the judge gave {number:g}; the scale is from {low:g} to {high:g}"
                value = (number - low) / (high - low)
                event = RewardEvent(turn=turn, name=self._spec.name, value=value, cause=cause, source=self.source)
                return event, said
        raise SpecCodeError(
            f"the judge gave no number on its scale in {self._spec.tries} replies; the last one was {said[:200]!r}: "
            "say in its `prompt` how to answer, and read that with its `pattern`",
            blame="environment",
            kind="judge_unreadable",
        )

    def read(self, text: str) -> float | None:
        """Return the last number in a text, if it is on the scale."""
        numerals = [match[1] for match in self._pattern.finditer(text)]
        try:
            number = float(numerals[-1]) if numerals else None
        except (TypeError, ValueError):
            return None
        low, high = self._spec.scale
        return number if number is not None and low <= number <= high else None


def judge(loaded: LoadedSpec, code: Workers) -> Judge | None:
    """The hook `reward_source`."""
    spec = loaded.spec.rewards.scorer
    return Judge(spec) if spec is not None and spec.model_played else None
