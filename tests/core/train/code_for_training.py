"""A listener that likes vowels: something that a model of random weights can learn in a few steps."""

from __future__ import annotations

import threading

from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.reward import RewardEvent

GATE = threading.Event()
GATE.set()


def vowels(text: str) -> float:
    """The share of vowels among a text's letters, whole texts only."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0


class Listener:
    """Asks for more after the first reply, and is satisfied by the second."""

    def respond(self, view: EpisodeView) -> UserTurn:
        GATE.wait(60)
        reward = RewardEvent(name="vowels", value=vowels(view.reply), turn="last")
        return UserTurn(content="More.", satisfied=view.turn > 0, solved=reward.value > 0.9, rewards=[reward])


class Bored:
    """Finds everything equally good."""

    def respond(self, view: EpisodeView) -> UserTurn:
        return UserTurn(satisfied=True, rewards=[RewardEvent(value=1.0)])


class Broken:
    """A simulator that is always down."""

    def respond(self, view: EpisodeView) -> UserTurn:
        raise RuntimeError("the simulator is down")


class Fading:
    """Its simulator fails in all episodes of a task with number 0 but the first, and in all of other tasks but the first two."""

    def respond(self, view: EpisodeView) -> UserTurn:
        sample = int(view.episode_id.rpartition("/")[2])
        if sample >= (1 if view.task.id.partition("~")[0].endswith("0") else 2):
            raise RuntimeError("the simulator is down")
        return UserTurn(satisfied=True, rewards=[RewardEvent(value=1.0 + sample)])
