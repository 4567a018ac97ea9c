"""A reward that a model of random weights gets in different amounts."""

from __future__ import annotations

from engine.schemas.environment import EpisodeView
from engine.schemas.reward import RewardEvent


def vowels(view: EpisodeView) -> list[RewardEvent]:
    """The number of vowels in the last reply."""
    return [RewardEvent(name="vowels", value=float(sum(letter in "aeiou" for letter in view.reply)), cause="vowels")]
