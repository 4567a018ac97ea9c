"""A user that pays by turns, and whose simulator fails in some episodes, so that groups have different sizes."""

from __future__ import annotations

from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.reward import RewardEvent


class UnevenListener:
    """Asks for more after the first reply, and fails on second replies whose length is a multiple of five."""

    def respond(self, view: EpisodeView) -> UserTurn:
        if view.turn > 0 and len(view.reply) % 5 == 0:
            raise RuntimeError("the simulator is down")
        reward = RewardEvent(value=float(sum(map(ord, view.reply)) % 11), turn="last")
        return UserTurn(content="More.", satisfied=view.turn > 0, rewards=[reward])
