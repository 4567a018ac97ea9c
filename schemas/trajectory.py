"""The results of a run: outcomes, turns, and branches that are exact to the token."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.schemas.base import FloatArray, IntArray, Struct
from engine.schemas.experts import ExpertArray
from engine.schemas.generation import FinishReason
from engine.schemas.message import Message
from engine.schemas.reward import Posting

Blame = Literal["policy", "tool", "user", "environment", "backend", "spec", "engine"]
"""Who caused a failure. Only episodes whose failure is the policy's are trained on."""


class Failure(Struct, frozen=True, kw_only=True):
    """Why an episode could not continue: a value, never a crash."""

    kind: str
    """A stable name, such as `tool_timeout`, `user_error`, `context_overflow`, `guard_error`."""
    blame: Blame
    message: str
    """What happened, and how to fix it."""
    state: str = ""
    turn: int = -1
    trace: str | None = None
    """The traceback of an exception of an environment, tool or user, if there is one."""


class Outcome(Struct, frozen=True, kw_only=True):
    """How an episode ended."""

    state: str
    """The final state."""
    event: str
    """The event that led there."""
    limit: str | None = None
    """The limit that ended it, or None."""
    failure: Failure | None = None
    solved: bool = False
    """Whether a user, a tool or the environment reported the task as solved."""
    solved_turn: int | None = None
    """The newest assistant turn when the task was first reported as solved, from 0."""
    trainable: bool = True
    """False if the failure is not the policy's, or if token ids are not known."""
    reward: float = 0.0
    """Sum over turns and names."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    """Sum over turns, by name."""


class Turn(Struct, frozen=True, kw_only=True):
    """One assistant turn."""

    index: int
    branch: int
    """The branch that holds this turn's sampled tokens."""
    start: int
    """Its first sampled token in that branch."""
    end: int
    """One past its last sampled token."""
    finish: FinishReason
    event: str
    """The event of the turn: tool_calls, answered, truncated, malformed, aborted."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    state_key: str | None = None
    """The key of the state in which the turn began, if the credit method needs one: equal keys mean equal states; empty
    if the fact is not set yet."""
    seconds: float = 0.0
    queue_seconds: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    prompt_unchecked: bool = False
    """As `Generation.prompt_unchecked`."""
    unreceived: bool = False
    """Nobody received the reply: the agent program had closed the connection. Its tokens are not trained."""
    reply_tokens: int = 0
    """Length of a reply that came as text, in tokens as the backend counted them; 0 where its tokens are sampled
    ones."""
    cost: float = 0.0
    """Price of the turn, from `prices` of its backend."""


SpanKind = Literal["prompt", "generated", "bridge", "closing", "unreceived"]
"""What a run of tokens is; `unreceived`: sampled tokens of a reply that nobody received, which are not trained."""


class Span(Struct, frozen=True, kw_only=True):
    """A run of tokens on a tape."""

    kind: SpanKind
    start: int
    end: int
    turn: int = -1
    """For `generated` and `unreceived`: the assistant turn, from 0."""


class ImageSpan(Struct, frozen=True, kw_only=True):
    """The position of an image in a branch: tokens [start, end) are its placeholders and the tokens that its family
    adds around them."""

    image: str
    """`sha256:<hex>`, as in the run store."""
    start: int
    end: int
    grid: list[int]
    """What the family's processor made of it: (t, h, w) in patches for Qwen-VL, (rows, columns) of tiles for
    Idefics3."""


class Branch(Struct, frozen=True, kw_only=True):
    """One exact sequence that a model saw and sampled from: one training row.

    The four arrays are of one length. They are derived from the tape's spans.
    """

    index: int
    reason: str = ""
    """Why the branch began; empty for the first."""
    spans: list[Span]
    input_ids: IntArray
    loss_mask: IntArray
    """1 exactly on tokens that the model sampled, in replies that were received."""
    logprobs: FloatArray
    """The sampler's log-probs; 0.0 where the mask is 0."""
    weight_versions: IntArray
    """The weight version of each token; -1 where the mask is 0."""
    turn_ids: IntArray
    """Assistant turn from 0 on sampled tokens; -1 elsewhere."""
    images: list[ImageSpan] = msgspec.field(default_factory=list)
    """Exactly the images that this branch holds, in order."""
    routed_experts: ExpertArray | None = None
    """The experts that the sampler chose for the first n tokens, [n, layers, top_k]; n is the index of the last sampled
    token, which no model has read. None if they were not requested (`backend.routed_experts`)."""


class Condensation(Struct, frozen=True, kw_only=True):
    """One condensation of a conversation."""

    turn: int
    """The newest assistant turn before it; -1 before the first."""
    reason: str
    """The reason of the branch that it began."""
    thread: list[int | Message]
    """What the model was shown from then on: numbers of the episode's messages, and messages that stand for others."""
    blocks: list[int]
    """The blocks that it made."""
    before: int
    """Tokens of the prompt before it."""
    after: int
    """Tokens of the prompt after it."""
    said: int = -1
    """Number of the episode's messages before it; -1 in a run of a version that did not store it."""


class Trajectory(Struct, frozen=True, kw_only=True):
    """A finished episode."""

    run_id: str
    episode_id: str
    task_id: str
    sample_index: int
    seed: int
    history: Literal["branch", "keep"]
    """What was done if the template rewrote history: a new branch, or the sampled tokens were kept."""
    outcome: Outcome
    messages: list[Message]
    turns: list[Turn]
    branches: list[Branch]
    postings: list[Posting] = msgspec.field(default_factory=list)
    """The sealed ledger."""
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    path: list[tuple[str, str, str]] = msgspec.field(default_factory=list)
    """The transitions taken: (source, event, dest)."""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """tool_calls, tool_errors, user_turns, user_tokens (of a model that plays the user, where there are any),
    sampled_tokens, context_tokens, images, condensations, unreceived_replies."""
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Wall time by state."""
    condensations: list[Condensation] = msgspec.field(default_factory=list)
    """How the conversation was condensed, in order. `messages` holds all messages as they were said."""
