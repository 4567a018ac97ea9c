"""Drives one episode through its machine: action, record, event, transition.

Invariants:
- An action that anything outside the engine can see begins only when the record before it is durable. Sampling and calls
  of `pure` tools are pipelined: they may begin while that record is being written. A reply is appended only when
  everything before it is durable, so a crash loses at most one unfinished turn.
- The executor does not write the entry that ends an episode: the journal holds it, and writes it in the same commit
  as the episode's result. So a journal that has ended belongs to a finished episode. Where it does not (a run of an older
  engine, or an end that could not be written), the episode is finished from its journal, and no action is performed.
- An action that fails or reaches a limit does not change the conversation.
- An error inside one episode becomes a `Failure` of that episode. `run` raises for cancellation, for errors that stop
  the whole run (`EngineError.stops_run`), and where other calls blocked the event loop of its objects
  (`LoopReplacedError`): the episode then stays as its journal has it, and can be resumed.
- Limits are checked before an action, in the order of `engine.limits.LIMITS`. The action of a final state has no limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.actions.action import Action, EpisodeObjects
from engine.actions.calling.code_call import LoopReplacedError
from engine.deadline import EpisodeDeadline, PausableClocks
from engine.episode.episode import Episode
from engine.errors import ContextOverflow, EngineError, ReplayError, SpecCodeError
from engine.limit import MAX_STEPS
from engine.limits import CONTEXT, EPISODE_SECONDS, PROMPT_LIMITS
from engine.schemas.journal import FailureRecord, GenerationRecord, JournalEntry, LimitRecord, Record, RecordBase
from engine.store.codec import EncodedRecord, encode_record

if TYPE_CHECKING:
    from engine.actions.services import Filter
    from engine.episode.compiled import CompiledSpec
    from engine.store.journal import Journal, MemoryJournal
    from engine.store.writer import Write


_ROOM = frozenset({"images", *PROMPT_LIMITS})
"""Limits that may be avoided by a shorter prompt."""


Watch = Callable[[Episode, str, str], None]
"""Called at each transition with the episode, the state before it, and the event."""


class RestartNeededError(ReplayError):
    """The episode cannot be resumed where it stopped: it must start again from the beginning."""


class Executor:
    """Drives the episodes of one spec. All of them share it: it holds no state of an episode."""

    def __init__(
        self,
        compiled: CompiledSpec,
        *,
        watch: Watch | None = None,
        filters: Sequence[Filter] = (),
        clocks: PausableClocks | None = None,
    ) -> None:
        """Drive episodes of a compiled spec.

        Args:
            compiled: The spec.
            watch: Called at each transition.
            filters: See `EpisodeService.filter`; each gets what the one before it returned.
            clocks: Paused while no server is reachable; the episodes' clocks are added to it.
        """
        limits = compiled.spec.limits
        self._compiled = compiled
        self._seconds = limits.episode_seconds
        self._watch = watch
        self._filters = filters
        self._clocks = clocks or PausableClocks()

    async def run(self, episode: Episode, objects: EpisodeObjects, journal: Journal | MemoryJournal) -> None:
        """Drive the episode to its end. The journal then holds its last entry. An error is stored in the episode's `failure`.

        Raises:
            LoopReplacedError: its objects are bound to an event loop that another call blocked; the episode can be
                resumed from its journal, with new objects.
        """
        ends, actions, clock = self._compiled.ends, self._compiled.actions, self._clock(episode)
        pending: Write | None = None
        """The newest entry, which may not be durable yet."""
        try:
            while episode.state not in ends:
                action = actions.get(episode.state)
                if (
                    pending is not None
                    and not pending.durable
                    and (pending.parked or action is None or not action.pipelined(episode, objects))
                ):
                    await pending
                at, began, stood = time.time(), time.perf_counter(), 0.0 if clock is None else clock.stood
                try:
                    record = self._refused(episode, action, clock, began)
                    if record is None:
                        assert action is not None  # else it is refused
                        if (preparing := action.prepare(episode)) is not None:
                            await preparing
                        record = self._limited(episode, action, clock)
                        if record is None:
                            record = await action.perform(episode, objects)
                            if not isinstance(record, GenerationRecord):  # what the model sampled stays as it is
                                record = await self._filtered(episode, record)
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
                if pending is not None and not pending.durable and isinstance(record, GenerationRecord):
                    await pending
                entry, encoded = self._fed(episode, record, at, seconds)
                if entry.dest in ends:
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
        """Let the current state fail before its action begins. Returns whether that ends the episode; else `run` continues it."""
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
        encoded = _encoded(record, episode)
        record = encoded.record  # in the form in which a replay reads it, so that both give the same result
        event, dest = episode.feed(record, seconds)
        if self._watch is not None and dest:
            self._watch(episode, state, event)
        return JournalEntry(
            seq=seq, state=state, event=event, dest=dest, record=record, at=at, seconds=seconds
        ), encoded

    def _refused(
        self, episode: Episode, action: Action | None, clock: EpisodeDeadline | None, now: float
    ) -> Record | None:
        """The limit on time, where the episode has used it up. Raises: SpecCodeError: the machine leads nowhere."""
        if action is None:
            raise SpecCodeError(
                f"state `{episode.state}` has no action and is not final; give it one", blame="spec", kind="no_action"
            )
        if episode.seq >= MAX_STEPS:
            raise SpecCodeError(
                f"{MAX_STEPS} steps without reaching a final state: bound the machine's cycles with a limit",
                blame="spec",
                kind="unbounded",
            )
        if clock is None or now < clock.ends or episode.state in self._compiled.machine.final or not clock.passed(now):
            return None
        return LimitRecord(limit=EPISODE_SECONDS.name, value=clock.spent(now))

    def _limited(self, episode: Episode, action: Action, clock: EpisodeDeadline | None) -> Record | None:
        """The limit that stops the action now; None if it begins, which the clock then interrupts when the time ends."""
        state, compiled = episode.state, self._compiled
        if state in compiled.machine.final:
            return None
        reached = action.limit(episode)
        if state in compiled.makes_room and (reached is None or reached[0] in _ROOM):
            full = action.overflow(episode)
            if full is not None:
                return LimitRecord(limit=full[0], value=full[1], overflow=True)
        if reached is not None:
            return LimitRecord(limit=reached[0], value=float(reached[1]))
        if clock is not None:
            clock.acting = True
        return None

    async def _filtered(self, episode: Episode, record: Record) -> Record:
        """Return the record that is stored in place of what an action has returned."""
        for filter_record in self._filters:
            filtered = filter_record(episode, record)
            record = filtered if isinstance(filtered, RecordBase) else await filtered
        return record

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
        if not isinstance(error, EngineError):
            return FailureRecord(failure=episode.unexpected(error))
        if error.stops_run:
            raise error
        return FailureRecord(failure=episode.failure_of(error))

    async def restore(
        self, episode: Episode, objects: EpisodeObjects, journal: Sequence[JournalEntry], *, call: bool = True
    ) -> None:
        """Bring an episode to the end of its journal; repeat only the calls that must be repeated.

        Where the journal has ended, and without `call`, the journal is fed and no call is made.

        Raises:
            RestartNeededError: a call cannot be repeated, or its answer differs now.
            ReplayError: the journal's transitions differ now: the spec or the engine has changed, or a plugin is missing.
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

    async def _again(self, episode: Episode, action: Action, objects: EpisodeObjects) -> Record:
        """The record that an action gives when it is performed again, without limits."""
        try:
            record = await action.perform(episode, objects)
            return record if isinstance(record, GenerationRecord) else await self._filtered(episode, record)
        except Exception as error:  # noqa: BLE001  (as in `run`)
            return self._excused(error, episode, None)

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
        again = _encoded(await self._again(episode, action, objects), episode)
        objects.repeating = None
        if _comparable(again.record) != _comparable(record):
            raise RestartNeededError(f"{episode.id}: {entry.state} (step {entry.seq}) gives a different answer now")


def _encoded(record: Record, episode: Episode) -> EncodedRecord:
    """A record in columns; the record of a failure instead, where an answer of the spec's code cannot be stored."""
    try:
        return encode_record(record)
    except EngineError as error:
        return encode_record(FailureRecord(failure=episode.failure_of(error)))


def _comparable(record: Record) -> Any:
    """A record's content for comparison, without durations, tracebacks and what is never equal again."""
    told = record.plain()
    for result in told.get("results", ()):
        result.pop("seconds", None)
    told.get("failure", {}).pop("trace", None)
    for name in record.unrepeated:
        told.pop(name, None)
    return told
