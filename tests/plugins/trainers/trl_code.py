"""A user that fails in some episodes, and a gallery that pays for each reply."""

from __future__ import annotations

from vision_code import Gallery

from engine.schemas.environment import EpisodeView, Step, UserTurn
from engine.schemas.reward import RewardEvent


class SometimesDown:
    """Raises in the episodes whose reply has an even number of letters."""

    def respond(self, view: EpisodeView) -> UserTurn:
        if len(view.reply) % 2 == 0:
            raise RuntimeError("the simulator is down")
        return UserTurn(satisfied=True, rewards=[RewardEvent(value=float(len(view.reply)))])


class PaidGallery(Gallery):
    """Shows images after each reply, and pays by the reply's letters."""

    def step(self, view: EpisodeView) -> Step:
        reward = RewardEvent(value=float(sum(map(ord, view.reply)) % 7), turn="last")
        return super().step(view).model_copy(update={"rewards": [reward]})
