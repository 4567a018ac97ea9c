"""Every limit on an episode: its name and unit, the action that it stops, and how it is counted.

The executor, the guard variables, the proofs, the worst case, budgets, scenario coverage, the JSON Schema and docs/spec.md
read this table and repeat nothing of it. To add a limit: its field in `LimitsSpec` and its entry in `LIMITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.role import UserSpec

UNBOUNDED = 2**53 - 1
"""What a guard reads for a limit that is not set: the largest integer that a double holds exactly."""
MAX_STEPS = 100_000
"""Steps of an episode after which the executor stops it, whatever its machine and its limits say."""

Unit = Literal["turns", "calls", "steps", "images", "condensations", "tokens", "seconds"]
Owner = Literal["limits", "model", "user"]
"""Which part of the spec sets a limit: `limits`, `model` or the `limits` of a user."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit. It stops its action before that begins, unless `cuts` says otherwise."""

    name: str
    """Its name in records and outcomes; of the owner `limits`, also its field of `LimitsSpec`."""
    unit: Unit
    counted: str
    """What is counted, for guards' variables and the docs."""
    action: str | None = None
    """The action that it stops; None: the action of every state that is not final."""
    count: Callable[[Episode], int] | None = None
    """The count so far. None for time, which the executor measures, and for what is cut."""
    per_use: Literal["one", "calls"] | None = None
    """How much a use of the action adds, which makes the count provable: one, or as many as the newest reply's tool calls.
    None: the count does not follow from which actions ran, so proofs assume that the limit may be reached at any time."""
    variable: str | None = None
    """The guard variable that holds the count."""
    budget: str | None = None
    """Its name in `engine validate --budget`."""
    owner: Owner = "limits"
    inclusive: bool = False
    """Whether the count may equal the limit; otherwise reaching the limit stops the action."""
    always: bool = False
    """Whether it holds even if the spec does not set it."""
    cuts: str = ""
    """What it ends, if it does not stop an action."""
    examples: tuple[Any, ...] = ()
    """Values that an editor proposes."""

    @property
    def key(self) -> str:
        """Its key in the spec, for docs."""
        last = self.name.rpartition(".")[2]
        return {"limits": f"limits.{last}", "model": f"model.{last}", "user": f"user.limits.{last}"}[self.owner]

    def value(self, spec: EpisodeSpec, user: UserSpec | None = None) -> float | None:
        """The limit that a spec sets; None if it sets none.

        Args:
            spec: The spec.
            user: The episode's user, whose own limits apply.
        """
        owner: Any = {"limits": spec.limits, "model": spec.model, "user": None if user is None else user.limits}[
            self.owner
        ]
        found: float | None = getattr(owner, self.name.rpartition(".")[2], None)
        return found

    def may_stop(self, spec: EpisodeSpec) -> bool:
        """Whether it may stop its action in some episode of the spec."""
        users = spec.users_by_name.values() if self.owner == "user" else [None]
        return self.always or any(self.value(spec, user) is not None for user in users)

    def is_reached(self, count: float, limit: float) -> bool:
        """Whether a count stops the action."""
        return count > limit if self.inclusive else count >= limit


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

LIMITS: tuple[Limit, ...] = (
    EPISODE_SECONDS,
    Limit(
        "assistant_turns",
        "turns",
        "Turns of the model so far.",
        "generate",
        lambda episode: episode.turn + 1,
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
        "condensations",
        "condensations",
        "Condensations of the conversation so far.",
        "condense",
        lambda episode: episode.condensed,
        per_use="one",
        variable="condensed.times",
        budget="condensations",
        examples=(4,),
    ),
    Limit(
        "user_turns",
        "turns",
        "Turns of the user so far.",
        "ask_user",
        lambda episode: episode.user_turns,
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
        lambda episode: episode.user_turns,
        owner="user",
    ),
    Limit(
        "user.tokens",
        "tokens",
        "Tokens that the model behind the user has sampled.",
        "ask_user",
        lambda episode: episode.user_tokens,
        owner="user",
    ),
    Limit(
        "tool_calls",
        "calls",
        "Tool calls so far.",
        "call_tools",
        lambda episode: episode.tool_calls,
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
"""In the order in which they are checked; those that cut something come last."""

FIELDS: tuple[str, ...] = tuple(limit.name for limit in LIMITS if limit.owner == "limits")
"""The fields of `LimitsSpec` that are limits; the others say how a text is cut."""

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


def limit_variables(limits: LimitsSpec) -> dict[str, int | float]:
    """Return the `limits` variable of guards: every limit, `UNBOUNDED` if it is not set."""
    return {name: UNBOUNDED if value is None else value for name, value in limits if name in FIELDS}
