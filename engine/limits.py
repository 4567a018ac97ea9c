"""A table: every limit on an episode, with its name and unit, the action that it stops, and how it is counted.

The executor, the guard variables, the proofs, the worst case, budgets, scenario coverage, the JSON Schema and
docs/spec.md read this table and repeat nothing of it. To add a limit: its field in `LimitsSpec` and its entry in
`_CORE`. A plugin adds one by the point `limits` of its face, with a key of an inline section of `limits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from engine import plugin
from engine.schemas.limits import UNBOUNDED, Limit, LimitsSpec

if TYPE_CHECKING:
    from engine.episode.episode import Episode


@dataclass(slots=True)
class EpisodeCounts:
    """What an episode has used so far, where it follows from its records alone."""

    user_turns: int = 0
    user_tokens: int = 0
    """Tokens that the model behind the user has sampled."""
    tool_calls: int = 0
    tool_errors: int = 0
    sampled_tokens: int = 0


def _prompt_tokens(episode: Episode) -> int:
    return len(episode.conversation.prompt())


EPISODE_SECONDS = Limit(
    "episode_seconds",
    "seconds",
    "Wall time of the episode. It also interrupts an action that is waiting.",
    budget="seconds",
    examples=("10m", 600),
)
CONTEXT = Limit(
    "context",
    "tokens",
    "Length of the prompt, against the context of the model and of its server.",
    "generate",
    _prompt_tokens,
    owner="model",
    always=True,
)


_CORE: tuple[Limit, ...] = (
    EPISODE_SECONDS,
    Limit(
        "assistant_turns",
        "turns",
        "Turns of the model so far.",
        "generate",
        attrgetter("assistant_turns"),
        per_use="one",
        variable="turns.assistant",
        budget="turns",
        examples=(8,),
    ),
    Limit(
        "images",
        "images",
        "Images in the conversation.",
        "generate",
        lambda episode: len(episode.conversation.thread.images),
        variable="images.shown",
        budget="images",
        inclusive=True,
        examples=(16,),
    ),
    Limit("episode_tokens", "tokens", "Length of the prompt.", "generate", _prompt_tokens, examples=(4096,)),
    CONTEXT,
    Limit(
        "user_turns",
        "turns",
        "Turns of the user so far.",
        "ask_user",
        attrgetter("counts.user_turns"),
        per_use="one",
        variable="turns.user",
        budget="user_turns",
        examples=(3,),
    ),
    Limit(
        "user.turns",
        "turns",
        "Turns of the episode's user so far.",
        "ask_user",
        attrgetter("counts.user_turns"),
        owner="user",
    ),
    Limit(
        "user.tokens",
        "tokens",
        "Tokens that the model behind the user has sampled.",
        "ask_user",
        attrgetter("counts.user_tokens"),
        owner="user",
    ),
    Limit(
        "tool_calls",
        "calls",
        "Tool calls so far.",
        "call_tools",
        attrgetter("counts.tool_calls"),
        per_use="calls",
        variable="tools.calls",
        budget="tool_calls",
        examples=(16,),
    ),
    Limit("turn_tokens", "tokens", "Tokens of one reply.", cuts="the reply: event `truncated`", examples=(512,)),
    Limit(
        "tool_seconds", "seconds", "Time of one tool call.", cuts="the call: its result is an error", examples=("5s",)
    ),
    Limit(
        "tool_result_tokens",
        "tokens",
        "Tokens of one tool's result, or of one text of an environment or a user.",
        cuts="the text: `tool_result_mark` stands for what is left out",
        examples=(1024,),
    ),
)

_AFTER_PROMPT = _CORE.index(CONTEXT) + 1
LIMITS: tuple[Limit, ...] = (
    *_CORE[:_AFTER_PROMPT],
    *plugin.loaded("limits", [limit.name for limit in _CORE]).values(),
    *_CORE[_AFTER_PROMPT:],
)
"""In the order in which they are checked, those of plugins behind those on the prompt; those that cut something come
last."""

FIELDS: tuple[str, ...] = tuple(limit.name for limit in LIMITS if limit.owner == "limits")
"""The keys of `limits` that are limits; the others say how a text is cut."""

PROMPT_LIMITS = frozenset(limit.name for limit in LIMITS if limit.count is _prompt_tokens)
"""The limits on the length of the prompt."""

COUNTERS: tuple[Limit, ...] = tuple(limit for limit in LIMITS if limit.per_use is not None)
"""The limits whose counts follow from which actions ran; the order is that of the counters in `engine.validate`."""

COUNTERS_OF: Mapping[str, tuple[int, ...]] = {
    str(action): tuple(index for index, limit in enumerate(COUNTERS) if limit.action == action)
    for action in dict.fromkeys(limit.action for limit in COUNTERS)
}
"""Which of `COUNTERS` count the uses of an action."""


def limits_of(action: str | None) -> Iterator[Limit]:
    """Yield the limits that may stop an action, in the order in which they are checked."""
    return (limit for limit in LIMITS if not limit.cuts and limit.action in (None, action)) if action else iter(())


def limit_values(limits: LimitsSpec) -> dict[str, int | float]:
    """Return the `limits` variable of guards: every limit, `UNBOUNDED` if it is not set."""
    values = {name: limits.value_of(name) for name in FIELDS}
    return {name: UNBOUNDED if value is None else value for name, value in values.items()}
