"""Drives one episode through its machine: action, record, event, transition.

Invariants:
- An action that anything outside the engine can see begins only when the record before it is durable. Sampling and
  calls of `pure` tools are pipelined: they may begin while that record is being written. A reply is appended only when
  everything before it is durable, so a crash loses at most one unfinished turn.
- The executor does not write the entry that ends an episode: the journal holds it, and writes it in the same commit
  as the episode's result. So a journal that has ended belongs to a finished episode. Where it does not (an
  end that could not be written), the episode is finished from its journal, and no action is performed.
- An action that fails or reaches a limit does not change the conversation.
- An error inside one episode becomes a `Failure` of that episode. `run` raises for cancellation, for errors that stop
  the whole run (`EngineError.stops_run`), and where other calls blocked the event loop of its objects
  (`LoopReplacedError`): the episode then stays as its journal has it, and can be resumed.
- Limits are checked before an action, in the order of `engine.limits.LIMITS`. The action of a final state has no
  limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.actions.action import Action, EpisodeObjects
from engine.actions.calling.code_call import LoopReplacedError
from engine.clocks import EpisodeDeadline, PausableClocks
from engine.episode.episode import Episode
from engine.errors import ContextOverflow, EngineError, ReplayError, SpecCodeError
from engine.limits import CONTEXT, EPISODE_SECONDS, PROMPT_LIMITS
from engine.schemas.base import Struct
from engine.schemas.journal import FailureRecord, GenerationRecord, JournalEntry, LimitRecord, Record, ToolsRecord
from engine.schemas.limits import MAX_STEPS
from engine.store.codec import EncodedRecord, are_texts, encode_record

if TYPE_CHECKING:
    from engine.actions.record_filters import Filter
    from engine.episode.compiled import CompiledSpec
    from engine.store.journal import Journal, MemoryJournal
    from engine.store.writer import Write


_ROOM = frozenset({"images", *PROMPT_LIMITS})
"""Limits that may be avoided by a shorter prompt."""


_UNCHANGED = frozenset({GenerationRecord, LimitRecord})
"""Records that are stored as they are: what the model sampled, and what holds no content."""
Watch = Callable[[Episode, str, str], None]
"""Called at each transition with the episode, the state before it, and the event."""


class RestartNeededError(ReplayError):
    """The episode cannot be resumed where it stopped: it must start again from the beginning."""


@dataclass(slots=True)
class _Stage:
    """What the executor knows of a state."""

    action: Action | None
    ends: bool
    """Whether an episode that comes here has ended."""
    final: bool
    """Whether its action has no limits."""
    makes_room: bool
    """Whether it handles the event `overflow`."""
    prepares: bool
    """Whether its limits may need work first that would block the event loop."""


class Executor:
    """Drives the episodes of one spec. All of them share it: it holds no state of an episode."""

    def __init__(
        self,
        compiled: CompiledSpec,
        *,
        watch: Watch | None = None,
        filters: tuple[Sequence[Filter], bool] = ((), False),
        clocks: PausableClocks | None = None,
    ) -> None:
        """Drive episodes of a compiled spec.

        Args:
            compiled: The spec.
            watch: Called at each transition.
            filters: What records pass before they are stored: see `record_filters`.
            clocks: Paused while no server is reachable; the episodes' clocks are added to it.
        """
        self._compiled = compiled
        self._stages: dict[str, _Stage] = {}
        for state in ("", *compiled.machine.states):
            action = compiled.actions.get(state)
            self._stages[state] = _Stage(
                action,
                ends=state in compiled.ends,
                final=state in compiled.machine.final,
                makes_room=state in compiled.makes_room,
                prepares=action is not None and type(action).prepare is not Action.prepare,
            )
        self._seconds = compiled.spec.limits.episode_seconds
        self._watch = watch
        self._filters, self._texts = filters
        self._clocks = clocks or PausableClocks()

    async def run(self, episode: Episode, objects: EpisodeObjects, journal: Journal | MemoryJournal) -> None:
        """Drive the episode to its end. The journal then holds its last entry. An error is stored in the episode's
        `failure`.

        Raises:
            LoopReplacedError: its objects are bound to an event loop that another call blocked; the episode can be
                resumed from its journal, with new objects.
        """
        stages, clock = self._stages, self._clock(episode)
        pending: Write | None = None
        """The newest entry, which may not be durable yet."""
        try:
            while not (stage := stages[episode.state]).ends:
                action = stage.action
                if (
                    pending is not None
                    and not pending.durable
                    and (pending.parked or action is None or not action.pipelined(episode, objects))
                ):
                    await pending
                at, began, stood = time.time(), time.perf_counter(), 0.0 if clock is None else clock.stood
                try:
                    record = self._begin(episode, stage, objects, clock, began)
                    if not isinstance(record, Struct):
                        record = await record
                    if type(record) not in _UNCHANGED and (
                        self._texts or type(record) is not ToolsRecord or not are_texts(record.results)
                    ):
                        record = self._filtered(episode, record)
                        if not isinstance(record, Struct):
                            record = await record
                    if clock is not None and clock.over:
                        clock.withdraw()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (an error in one episode ends no other)
                    if isinstance(error, LoopReplacedError) and pending is not None:
                        await pending  # a resume reads the journal
                    record = self._excused(error, episode, clock)
                seconds = time.perf_counter() - began
                if clock is not None:
                    clock.acting = False
                    seconds -= clock.stood - stood  # waiting for a server does not count as time of the episode
                if pending is not None and not pending.durable and type(record) is GenerationRecord:
                    await pending
                entry, encoded = self._fed(episode, record, at, seconds)
                if stages[entry.dest].ends:
                    journal.hold(entry, encoded)
                    return
                pending = journal.append(entry, encoded)
        finally:
            if clock is not None:
                self._clocks.remove(clock)
                clock.stop()

    def _clock(self, episode: Episode) -> EpisodeDeadline | None:
        if self._seconds is None:
            return None
        clock = EpisodeDeadline(self._seconds, time.time() - episode.started)
        self._clocks.add(clock)
        return clock

    async def fail(self, episode: Episode, journal: Journal | MemoryJournal, error: EngineError) -> bool:
        """Let the current state fail before its action begins. Returns whether that ends the episode; else `run`
        continues it."""
        record = FailureRecord(failure=episode.failure_of(error), built=False)
        entry, encoded = self._fed(episode, record, time.time(), 0.0)
        if entry.dest in self._compiled.ends:
            journal.hold(entry, encoded)
            return True
        await journal.append(entry, encoded)
        return False

    def _fed(self, episode: Episode, record: Record, at: float, seconds: float) -> tuple[JournalEntry, EncodedRecord]:
        """Feed a record and return its journal entry, which is still to be written."""
        seq, state = episode.seq, episode.state
        try:
            encoded = encode_record(record)
        except EngineError as error:  # an answer of the spec's code that cannot be stored
            encoded = encode_record(FailureRecord(failure=episode.failure_of(error)))
        record = encoded.record  # in the form in which a replay reads it, so that both give the same result
        event, dest = episode.feed(record, seconds)
        if self._watch is not None and dest:
            self._watch(episode, state, event)
        return JournalEntry(
            seq=seq, state=state, event=event, dest=dest, record=record, at=at, seconds=seconds
        ), encoded

    def _begin(
        self, episode: Episode, stage: _Stage, objects: EpisodeObjects, clock: EpisodeDeadline | None, now: float
    ) -> Record | Awaitable[Record]:
        """Begin the state's action, or give the record of the limit that stops it.

        Raises:
            SpecCodeError: the machine leads nowhere.
            Exception: as `Action.perform`.
        """
        action = stage.action
        if action is None:
            message = f"state `{episode.state}` has no action and is not final; give it one"
            raise SpecCodeError(message, blame="spec", kind="no_action")
        if episode.seq >= MAX_STEPS:
            message = f"{MAX_STEPS} steps without reaching a final state: bound the machine's cycles with a limit"
            raise SpecCodeError(message, blame="spec", kind="unbounded")
        if clock is not None and now >= clock.ends and not stage.final and clock.passed(now):
            return LimitRecord(limit=EPISODE_SECONDS.name, value=clock.spent(now))
        if stage.prepares and (preparing := action.prepare(episode)) is not None:
            return self._prepared(preparing, episode, stage, objects, clock)
        if not stage.final:
            reached = action.limit(episode)
            if stage.makes_room and (reached is None or reached[0] in _ROOM):
                full = action.overflow(episode)
                if full is not None:
                    return LimitRecord(limit=full[0], value=full[1], overflow=True)
            if reached is not None:
                return LimitRecord(limit=reached[0], value=float(reached[1]))
            if clock is not None:
                clock.acting = True
        return action.perform(episode, objects)

    async def _prepared(
        self,
        preparing: Awaitable[object],
        episode: Episode,
        stage: _Stage,
        objects: EpisodeObjects,
        clock: EpisodeDeadline | None,
    ) -> Record:
        """Begin the state's action when what its limits need is done."""
        await preparing
        record = self._begin(episode, replace(stage, prepares=False), objects, clock, time.perf_counter())
        return record if isinstance(record, Struct) else await record

    def _filtered(self, episode: Episode, record: Record, first: int = 0) -> Record | Awaitable[Record]:
        """The record that is stored in place of what an action has returned: what the filters from `first` on make of
        it."""
        for place in range(first, len(self._filters)):
            filtered = self._filters[place](episode, record)
            if not isinstance(filtered, Struct):
                return self._filtered_later(episode, filtered, place + 1)
            record = filtered
        return record

    async def _filtered_later(self, episode: Episode, filtering: Awaitable[Record], rest: int) -> Record:
        record = self._filtered(episode, await filtering, rest)
        return record if isinstance(record, Struct) else await record

    def _excused(self, error: BaseException, episode: Episode, clock: EpisodeDeadline | None) -> Record:
        """The record of an action that raised. Raises the error where it ends more than the action."""
        if clock is not None and clock.over and isinstance(error, asyncio.CancelledError | TimeoutError):
            if not clock.withdraw() and isinstance(error, asyncio.CancelledError):
                raise error  # other code cancelled the task too
            return LimitRecord(limit=EPISODE_SECONDS.name, value=self._seconds or 0.0, began=True)
        if isinstance(error, ContextOverflow):
            return LimitRecord(limit=CONTEXT.name, value=float(episode.conversation.length))
        if isinstance(error, LoopReplacedError) and not error.repeatable:
            return FailureRecord(failure=episode.failure_of(error))
        if isinstance(error, LoopReplacedError | asyncio.CancelledError):
            raise error
        if isinstance(error, EngineError) and error.stops_run:
            raise error
        return FailureRecord(failure=episode.failure_of(error))

    async def restore(
        self, episode: Episode, objects: EpisodeObjects, journal: Sequence[JournalEntry], *, call: bool = True
    ) -> None:
        """Bring an episode to the end of its journal; repeat only the calls that must be repeated.

        Where the journal has ended, and without `call`, the journal is fed and no call is made.

        Raises:
            RestartNeededError: a call cannot be repeated, or its answer differs now.
            ReplayError: the journal's transitions differ now: the spec or the engine has changed, or a plugin is
                missing.
        """
        ended = self._compiled.has_ended(journal)
        for entry in journal:
            if call and not ended:
                await self._call_again(episode, objects, entry)
            action = None
            if isinstance(entry.record, GenerationRecord):
                action = self._compiled.actions.get(episode.state)
                episode.conversation.recorded = entry.record.whole
            if action is not None and (preparing := action.prepare(episode)) is not None:
                await preparing
            _, dest = episode.follow(entry)
            if self._watch is not None and dest:
                self._watch(episode, entry.state, entry.event)
        if ended or not journal or not call:
            return
        action = self._compiled.actions.get(episode.state)
        if action is not None and action.effects(episode, objects) == "external":
            raise RestartNeededError(
                f"{episode.id}: it stopped in {episode.state}, whose call may have been made and cannot be repeated"
            )
        # The clock is paused between a crash and the resume, and while no server is reachable.
        episode.started = time.time() - sum(entry.seconds for entry in journal)

    async def _call_again(self, episode: Episode, objects: EpisodeObjects, entry: JournalEntry) -> None:
        """Repeat the call of an entry, where that is needed to restore the state of the spec's objects."""
        record, action = entry.record, self._compiled.actions.get(episode.state)
        called = record.began if isinstance(record, LimitRecord) else getattr(record, "built", True)
        if action is None or not called:
            return
        effects = action.effects(episode, objects)
        if effects == "pure":
            return
        if effects == "external":
            raise RestartNeededError(f"{episode.id}: the call in {entry.state} cannot be repeated")
        if isinstance(record, LimitRecord):
            raise RestartNeededError(f"{episode.id}: episode_seconds interrupted the call in {entry.state}")
        objects.repeating = record
        try:  # without limits, and as a journal would have it
            again = action.perform(episode, objects)
            again = self._filtered(episode, again if isinstance(again, Struct) else await again)
            again = encode_record(again if isinstance(again, Struct) else await again).record
        except Exception as error:  # noqa: BLE001  (as in `run`)
            again = self._excused(error, episode, None)
        objects.repeating = None
        if _comparable(again) != _comparable(record):
            raise RestartNeededError(f"{episode.id}: {entry.state} (step {entry.seq}) gives a different answer now")


def _comparable(record: Record) -> Any:
    """A record's content for comparison, without durations, tracebacks and what is never equal again."""
    content = record.plain()
    for result in content.get("results", ()):
        result.pop("seconds", None)
    content.get("failure", {}).pop("trace", None)
    for name in record.unrepeated:
        content.pop(name, None)
    return content
