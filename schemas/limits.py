"""What people write under `limits`, validated: what one episode may cost."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.base import Seconds
from engine.schemas.sections import SectionOwner


class LimitsSpec(SectionOwner):
    """Limits on one episode. They are checked before each action, in the order of these fields."""

    OWNER: ClassVar[str] = "limits"

    episode_seconds: Seconds | None = 600.0
    """Wall time of the whole episode."""
    assistant_turns: int | None = Field(default=8, ge=1)
    """Maximum number of turns of the model."""
    images: int | None = Field(default=None, ge=1)
    """Maximum number of images in the conversation when the model is called."""
    episode_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the current branch: prompt, replies, and the closing tokens and messages between them. A reply is cut at
    exactly this length. The model's context when left out."""
    turn_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens that the model samples in one turn."""
    tool_calls: int | None = Field(default=16, ge=1)
    """Maximum number of tool calls. Further calls in the same turn get an error result."""
    user_turns: int | None = Field(default=8, ge=1)
    """Maximum number of answers of the user."""
    tool_seconds: Seconds = 30.0
    """Deadline for one tool call."""
    tool_result_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one tool's result, and of each text of an environment or a user. Of a longer text, a part is left out."""
    tool_result_keep: Literal["start", "end", "both"] = "both"
    """Which part of a long text is shown: its start, its end, or as much of both."""
    tool_result_mark: str = "\n[… {{characters}} characters left out …]\n"
    """What stands in the place of what is left out; `{{characters}}` is how much that is. Its tokens count too."""

    @property
    def tokens_per_episode(self) -> int | None:
        """The longest possible episode: `episode_tokens`, else `assistant_turns` × `turn_tokens`, else None."""
        if self.episode_tokens is not None or self.assistant_turns is None:
            return self.episode_tokens
        return self.assistant_turns * self.turn_tokens
