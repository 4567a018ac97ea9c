"""What one episode may cost."""

from __future__ import annotations

from pydantic import Field

from engine.schemas.base import Contract, Seconds


class LimitsSpec(Contract):
    """What one episode may cost. Checked before each action, in the order of these fields."""

    episode_seconds: Seconds | None = 600.0
    """Wall time of the whole episode."""
    assistant_turns: int | None = Field(default=8, ge=1)
    """Turns that the model may take."""
    images: int | None = Field(default=None, ge=1)
    """Images that the conversation may hold when the model is asked."""
    episode_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the current branch: prompt, replies, and the closing tokens and messages between them. A reply is cut at
    exactly this length. The model's context when left out."""
    turn_tokens: int = Field(default=512, ge=1)
    """Tokens that the model may sample in one turn."""
    tool_calls: int | None = Field(default=16, ge=1)
    """Calls of tools. Calls beyond it inside one turn are answered with an error."""
    user_turns: int | None = Field(default=8, ge=1)
    """Answers of the user."""
    tool_seconds: Seconds = 30.0
    """Deadline for one tool call."""

    @property
    def tokens_per_episode(self) -> int | None:
        """`episode_tokens`, else `assistant_turns` × `turn_tokens`; None without either. The default length of `dr_grpo`."""
        if self.episode_tokens is not None or self.assistant_turns is None:
            return self.episode_tokens
        return self.assistant_turns * self.turn_tokens
