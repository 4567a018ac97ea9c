"""One episode. Invariant: it changes only in `feed`, which is pure; the same records give the same episode.

    episode = compiled.episode(task, sample, tools)
    event, dest = episode.feed(record)
    trajectory = episode.trajectory(run_id, exact=True)

Large data is kept once: tokens on the tape, text in the conversation.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec
import structlog

from engine.errors import EngineError, LedgerError, ReplayError
from engine.limits import LIMITS, EpisodeCounts
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import TurnPart
from engine.schemas.environment import EpisodeView, Task
from engine.schemas.journal import FailureRecord, LimitRecord, UnreadRecord
from engine.schemas.limits import FAILED, LIMIT, OVERFLOW
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.schemas.trajectory import Blame, Condensation, Failure, Outcome, Trajectory, Turn
from engine.storable import valid_text, words_of
from engine.store.store import episode_id_of
from engine.tokens.reply_parser import call_tokens, text_tokens

if TYPE_CHECKING:
    from engine.episode.compiled import CompiledSpec
    from engine.schemas.journal import JournalEntry, Record
    from engine.schemas.reward import PartAddress, TurnChoice
    from engine.tokens.conversation import Conversation

log = structlog.get_logger(__name__)

_BLAMES = frozenset(get_args(Blame))

_RARE = frozenset({"user_tokens", "unreceived_replies", "condensations", "images"})
"""Counts of a trajectory that are left out where they are 0."""

_NO_BLOCKS: dict[int, str] = {}
_NO_FEEDBACK: dict[str, Any] = {"solved": False, "satisfied": False, "malformed": False}


def derive_seed(*parts: object) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on nothing else."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


P = TypeVar("P")
UNRECEIVED = "unreceived"
"""Why a turn is not trained: nobody received its reply."""
GAVE_UP = (LimitRecord, FailureRecord)
"""Records of actions that did not end; they change no conversation."""


class NewestReply(msgspec.Struct, frozen=True, kw_only=True):
    """The newest reply of the model, as actions and guards read it."""

    text: str = ""
    finish: str = ""
    """How it ended: `stop`, `length`, `abort`."""
    matched: int | str | None = None
    """The stop token or text that ended it."""
    tokens: int = 0
    attempts: list[ToolCall | MalformedCall] = []
    """Its calls and malformed calls, in order."""
    calls: list[ToolCall] = []
    malformed: list[MalformedCall] = []


NO_REPLY = NewestReply()
"""Before the first turn."""


class Episode:
    """The live state of one episode.

    It begins with a task, the index of the task's sample, and a conversation that is not open.
    """

    __slots__ = (
        "_parts",
        "_seeds",
        "blocks",
        "compiled",
        "condensations",
        "conversation",
        "counts",
        "event",
        "facts",
        "failure",
        "feedback",
        "id",
        "ledger",
        "limit",
        "limit_count",
        "made_room_at",
        "opening",
        "path",
        "performed",
        "reply",
        "sample_index",
        "sampled_in",
        "sampling",
        "seconds",
        "seed",
        "seq",
        "solved",
        "solved_turn",
        "started",
        "state",
        "task",
        "turn",
        "turns",
        "untrained",
    )

    def __init__(self, compiled: CompiledSpec, task: Task, sample_index: int, conversation: Conversation) -> None:
        self.compiled = compiled
        self.id = episode_id_of(task.id, sample_index)
        self.task = task
        self.sample_index = sample_index
        self.seed = derive_seed(compiled.spec.rollout.seed, task.id, sample_index)
        self._seeds = blake2b(f"{self.seed}\0".encode(), digest_size=8)
        """Hash state that the seeds of all turns share: see `derive_seed`."""
        self.conversation: Conversation = conversation
        self.ledger = Ledger()
        self.state = compiled.machine.initial
        self.event = ""
        self.seq = 0
        self.started = time.time()
        self.turn: int = -1
        self.counts: EpisodeCounts = EpisodeCounts()
        self.reply: NewestReply = NO_REPLY
        self.turns: list[Turn] = []
        """Turns so far, without rewards, which are known only at the end."""
        self.sampled_in: list[str] = []
        """The state in which each turn was sampled."""
        self.facts: dict[str, Any] = {}
        self.feedback: dict[str, Any] = _NO_FEEDBACK
        self.path: list[tuple[str, str, str]] = []
        self.performed: defaultdict[str, int] = defaultdict(int)
        """How often each action was performed."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.limit: str | None = None
        self.limit_count = 0.0
        """The count at which the limit was reached."""
        self.failure: Failure | None = None
        self.solved = False
        self.solved_turn: int | None = None
        self.opening: list[Message] | None = None
        """After a reset whose messages an action keeps for itself (`ActionFacts.owns_conversation`): those messages."""
        self.sampling: Mapping[str, Any] = {}
        """What the next request changes of the spec's sampling: stop texts are added, other parameters replaced."""
        self.untrained: dict[int, str] = {}
        """Turn -> why its tokens are not trained."""
        self._parts: dict[type, Any] = {}
        self.blocks: dict[int, str] = {}
        """Original texts of the condensed blocks, by number."""
        self.condensations: list[Condensation] = []
        self.made_room_at: int | None = None
        """The newest assistant turn when an action last tried to make the prompt shorter; None: never."""

    def part(self, cls: type[P]) -> P:
        """A plugin's own state of this episode, made when it is first asked for. Only the plugin's `apply` changes
        it."""
        part: P | None = self._parts.get(cls)
        if part is None:
            part = self._parts[cls] = cls()
        return part

    @property
    def assistant_turns(self) -> int:
        """Turns of the model so far."""
        return self.turn + 1

    def turn_seed(self, turn: int) -> int:
        """Sampling seed of a turn."""
        seeds = self._seeds.copy()  # equals `derive_seed(seed, turn, salt)`; the hash state after the seed is reused
        salt = self.compiled.spec.rollout.salt
        seeds.update(b"%d\0%d" % (turn, salt) if salt else b"%d" % turn)
        return int.from_bytes(seeds.digest(), "big") >> 1

    def view(self) -> EpisodeView:
        """The view that the spec's code gets now."""
        return EpisodeView(
            episode_id=self.id,
            task=self.task,
            seed=self.seed,
            messages=list(self.conversation.messages),
            turn=self.turn,
            user_turn=self.counts.user_turns,
            calls=self.reply.calls,
            malformed=self.reply.malformed,
            finish=self.reply.finish,
            facts=dict(self.facts),
            rewards=self.ledger.totals(self.turn + 1),
            written=self.conversation.written if self.compiled.shows_written else "",
            blocks=dict(self.blocks) if self.blocks else _NO_BLOCKS,
        )

    def guard_values(self, names: frozenset[str]) -> dict[str, Any]:
        """Build the guard variables among `names`, and no others."""
        return {name: _VARIABLES[name](self) for name in names if name in _VARIABLES}

    def find(self, choice: TurnChoice) -> int | None:
        """Find the first or the last turn of a state or an event; None if there is none yet."""
        turns = zip(self.turns, self.sampled_in, strict=True)
        matching = [turn.index for turn, state in turns if choice.name in (state, turn.event)]
        return matching[0 if choice.first else -1] if matching else None

    def locate(self, turn: int, part: PartAddress) -> TurnPart:
        """Find the tokens of a part of a turn: a call, a text, or a range of tokens. Raises LedgerError if it has no
        such part."""
        sampled = self.turns[turn].end - self.turns[turn].start
        if not sampled:  # the reply is text only or has no tokens: no token can get credit
            return TurnPart(start=0, end=0, call=_call_number(part.call, turn) if part.call is not None else None)
        if part.tokens is not None:
            start, end = part.tokens
            if not start < end <= sampled:
                raise LedgerError(f"turn {turn} has {sampled} sampled tokens; [{start}, {end}) is not a range of them")
            return TurnPart(start=start, end=end)
        conversation = self.conversation
        before, ids = conversation.sampled(turn)
        if part.text is not None:
            span, what, call = text_tokens(conversation.template, ids, part.text), f"text {part.text[:80]!r}", None
        else:
            call = _call_number(part.call, turn)
            span = call_tokens(conversation.template, ids, before, conversation.tools or (), call)
            what = f"call {part.call!r}"
        if span is None:
            raise LedgerError(f"turn {turn} has no {what}; address the turn as a whole, or a part that it has")
        return TurnPart(start=span[0], end=span[1], call=call)

    def _rewards(self) -> dict[str, float]:
        totals = self.ledger.totals(self.turn + 1)
        return {
            "total": float(sum(totals)),
            "last": float(totals[-1]) if totals else 0.0,
            "previous": float(totals[-2]) if len(totals) > 1 else 0.0,
        }

    def feed(self, record: Record, seconds: float = 0.0) -> tuple[str, str]:
        """Apply what the state's action gave, or what prevented it, and take the transition. Pure: a replay consists of
        these calls.

        Returns (event, dest): the event is empty for a final state's own record, dest where the episode ends.
        """
        state, compiled = self.state, self.compiled
        self.seq += 1
        self.seconds[state] += seconds
        gave_up = type(record) in GAVE_UP
        try:
            if gave_up:
                self.conversation.take_back()  # a prompt may have been made for a reply that never arrived
            if isinstance(record, FailureRecord):
                event = self._failed(record.failure)
            elif isinstance(record, LimitRecord):
                event = OVERFLOW if record.overflow else LIMIT
                if not record.overflow:
                    self.limit, self.limit_count = record.limit, record.value
            else:
                event = compiled.actions[state].apply(self, record)
                name = str(compiled.machine.states[state].action)
                self.performed[name] += 1
            if self.solved and self.solved_turn is None:
                self.solved_turn = self.turn
            if state in compiled.rules.states and not gave_up:
                compiled.rules.apply(self)
        except Exception as error:  # noqa: BLE001  (an error of the engine must not end the other episodes)
            event = self._failed(self.failure_of(error))
        if state in compiled.machine.final:
            return "", ""
        dest = compiled.machine.settled.get((state, event)) or self._next(event)
        if dest is None:
            return event, ""
        self.path.append((state, event, dest))
        self.event, self.state = event, dest
        return event, dest

    def _failed(self, failure: Failure) -> str:
        if self.failure is None:  # the first failure is the cause of later ones
            self.failure = failure
        return FAILED

    def _next(self, event: str) -> str | None:
        """The state to which the event leads; None if no transition handles it, which is itself a failure."""
        try:
            return self.compiled.machine.next(self.state, event, self.guard_values)
        except EngineError as error:
            self._failed(self.failure_of(error))
        return self._next(FAILED) if event != FAILED else None

    def follow(self, entry: JournalEntry) -> tuple[str, str]:
        """Feed one journal entry. Raises ReplayError if it is not the next one, leads elsewhere now, or cannot be
        read."""
        if isinstance(entry.record, UnreadRecord):
            raise ReplayError(
                f"{self.id}: step {entry.seq} of the journal is a record of kind `{entry.record.kind}`; "
                f"{entry.record.words()}"
            )
        if entry.seq != self.seq or entry.state != self.state:
            raise ReplayError(
                f"{self.id}: step {entry.seq} of the journal belongs to {entry.state}; "
                f"the episode is at step {self.seq} in {self.state}"
            )
        event, dest = self.feed(entry.record, entry.seconds)
        if (event, dest) != (entry.event, entry.dest):
            raise ReplayError(
                f"{self.id}: step {entry.seq} led from {entry.state} by `{entry.event}` to {entry.dest or 'the end'}; "
                f"now it leads by `{event}` to {dest or 'the end'}"
            )
        return event, dest

    def failure_of(self, error: BaseException) -> Failure:
        """The failure that an exception becomes. One without a type is an error of the engine, and keeps its full
        traceback."""
        kind, blame, message = EngineError.kind, EngineError.blame, words_of(error)
        trace = getattr(error, "trace", None)
        if isinstance(error, EngineError):  # the spec's code may raise one too, so its fields are not trusted
            kind, message = valid_text(str(error.kind), 100), valid_text(str(error))
            blame = error.blame if error.blame in _BLAMES else "environment"
        else:
            log.error("unexpected error in an episode", episode=self.id, state=self.state, error=message)
            trace = "".join(traceback.format_exception(error))
        return Failure(
            kind=kind,
            blame=blame,
            message=message,
            state=self.state,
            turn=self.turn,
            trace=valid_text(trace) if isinstance(trace, str) else None,
        )

    def outcome(self, *, exact: bool) -> Outcome:
        """How the episode ended. `exact` says whether the backend gives token ids."""
        blameless = self.failure is None or self.failure.blame == "policy"
        by_name = self.ledger.by_name()
        aborted = "abort" in [turn.finish.type for turn in self.turns]
        return Outcome(
            state=self.state,
            event=self.event,
            limit=self.limit,
            failure=self.failure,
            solved=self.solved,
            solved_turn=self.solved_turn,
            trainable=exact and blameless and self.turn >= 0 and not aborted,
            reward=float(sum(self.ledger.totals(self.turn + 1))),
            rewards=by_name,
        )

    def trajectory(self, run_id: str, *, exact: bool) -> Trajectory:
        """The finished trajectory. Seals the ledger."""
        sealed, rewarded = self.ledger.seal(self.turn + 1), self.ledger.rewarded
        conversation, counts, untrained = self.conversation, self.counts, self.untrained
        unreceived = [turn for turn, why in untrained.items() if why == UNRECEIVED]
        uses = {
            "tool_calls": counts.tool_calls,
            "tool_errors": counts.tool_errors,
            "user_turns": counts.user_turns,
            "user_tokens": counts.user_tokens,
            "sampled_tokens": counts.sampled_tokens,
            "context_tokens": conversation.length,
            "unreceived_replies": len(unreceived),
            "condensations": len(self.condensations),
            "images": sum([len(said.images) for said in conversation.messages if not isinstance(said.content, str)]),
        }
        return Trajectory(
            run_id=run_id,
            episode_id=self.id,
            task_id=self.task.id,
            sample_index=self.sample_index,
            seed=self.seed,
            history=conversation.history,
            outcome=self.outcome(exact=exact),
            messages=list(conversation.messages),
            turns=[
                replace(turn, rewards=self.ledger.turn(turn.index), unreceived=turn.index in unreceived)
                if unreceived or turn.index in rewarded
                else turn
                for turn in self.turns
            ],
            branches=conversation.branches(untrained),
            postings=list(sealed.postings),
            facts=self.facts,
            path=self.path,
            counts={name: count for name, count in uses.items() if count or name not in _RARE},
            seconds=dict(self.seconds),
            condensations=list(self.condensations),
        )


def _counts(variable: str, **others: Callable[[Episode], int]) -> Callable[[Episode], dict[str, int]]:
    """Return the function that builds a guard variable: the counts of its limits, and others."""
    counts = dict(others)
    for limit in LIMITS:
        name, _, field = (limit.variable or "").partition(".")
        if name == variable and limit.count is not None:
            counts[field] = limit.count
    return lambda episode: {field: count(episode) for field, count in counts.items()}


_VARIABLES: dict[str, Callable[[Episode], Any]] = {
    **{name: _counts(name) for name in {limit.variable.partition(".")[0] for limit in LIMITS if limit.variable}},
    "tools": _counts("tools", errors=lambda e: e.counts.tool_errors),
    "tokens": _counts("tokens", sampled=lambda e: e.counts.sampled_tokens, context=lambda e: e.conversation.length),
    "limits": lambda e: e.compiled.limit_values,
    "rewards": lambda e: e._rewards(),
    "last": lambda e: {
        "finish": e.reply.finish,
        "tokens": e.reply.tokens,
        "calls": len(e.reply.calls),
        "malformed": bool(e.reply.malformed),
        "text": e.reply.text,
    },
    "feedback": lambda e: e.feedback,
    "facts": lambda e: e.facts,
    "task": lambda e: e.task.fields,
}


def _call_number(call: int | str | None, turn: int) -> int:
    """The number of a call in its turn, given that number or its id `call_<turn>_<number>`; -1 for any other id."""
    if isinstance(call, int):
        return call
    prefix, _, number = str(call).rpartition("_")
    return int(number) if prefix == f"call_{turn}" and number.isdecimal() else -1
