"""Requests for replies, as a backend gets them."""

from __future__ import annotations

from typing import Any

from engine.schemas.generation import GenerateRequest, SamplingParams


def generate_request(
    ids: Any = (1, 22, 333), sampling: SamplingParams | None = None, *, episode: str = "e", **changes: Any
) -> GenerateRequest:
    """A request for at most 8 tokens that continue these, in an episode's first turn; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "episode_id": episode,
        "turn": 0,
        "input_ids": ids,
        "sampling": sampling or SamplingParams(),
        "max_new_tokens": 8,
        "stop_token_ids": [2],
        "seed": 0,
    }
    return GenerateRequest.read(fields | changes)
