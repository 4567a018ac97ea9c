"""What the stand-ins of other trainers' inference engines reply: words that depend on the episode and on the length of its prompt."""

from __future__ import annotations

import zlib
from typing import Any

WORDS = ("yes", "never", "perhaps", "a word", "again", "now and then")


class ScriptedSampler:
    """Replies by a script, with the model's own tokenizer.

    Args:
        format: The chat format of the spec's model.
    """

    def __init__(self, format: Any) -> None:
        self._format = format
        self.sampled: list[tuple[str, list[int], list[float]]] = []
        """Every reply: the episode, its ids and its log-probs."""

    def reply(self, episode: str, prompt: list[int], most: int) -> tuple[list[int], list[float]]:
        """The ids and log-probs of a reply, which ends by the model's stop token."""
        number = zlib.crc32(f"{episode} {len(prompt)}".encode())
        ids = [*self._format.encode(WORDS[number % len(WORDS)]), self._format.stop_token_ids[0]]
        assert len(ids) <= most, "the limits of the spec are too small for the script"
        logprobs = [-0.125 * (1 + (number + place) % 7) for place in range(len(ids))]
        self.sampled.append((episode, ids, logprobs))
        return ids, logprobs
