"""Short texts of an episode for a list: its task, its last answer, and the place where a searched text was said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.plugins.show.listing.heads import EpisodeHead

LONGEST = 160
"""Maximum number of characters of a text."""
_AROUND = 60
"""Characters before and after a searched text."""


def excerpts(head: EpisodeHead, wanted: str) -> dict[str, Any]:
    """Return `task` (the first message of the user), `answer` (the last message of the policy) and `hit`: what was said
    before the searched text, the text, and what was said after it; None where it is not in the conversation."""
    asked = next((message.text for message in head.messages if message.role == "user"), "")
    answers = [message for message in head.messages if message.role == "assistant"]
    answer = answers[-1].text or ", ".join(call.name for call in answers[-1].tool_calls) if answers else ""
    hit = None
    if wanted and (place := re.search(re.escape(wanted), said := head.said(), re.IGNORECASE)):
        start, end = place.span()
        hit = [said[max(0, start - _AROUND) : start], said[start:end], said[end : end + _AROUND]]
    return {"task": _short(asked), "answer": _short(answer), "hit": hit}


def planned_excerpts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of an episode that has not ended: the longest text of the task's fields."""
    texts = [value for value in fields.values() if isinstance(value, str)]
    return {"task": _short(max(texts, key=len, default="")), "answer": "", "hit": None}


def _short(text: str) -> str:
    line = " ".join(text[: 4 * LONGEST].split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
