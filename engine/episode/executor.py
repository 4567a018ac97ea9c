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

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from engine.actions.base import EpisodeObjects
from engine.actions.calls import LoopReplacedError
from engine.actions.cut_texts import TextCutter
from engine.deadline import EpisodeDeadline
from engine.episode.episode import Episode
from engine.errors import ContextOverflow, EngineError, ReplayError, SpecCodeError
from engine.limit import MAX_STEPS
from engine.limits import CONTEXT, EPISODE_SECONDS, PROMPT_LIMITS
from engine.schemas.journal import FailureRecord, GenerationRecord, JournalEntry, LimitRecord, Record
from engine.store.codec import EncodedRecord, encode_record

if TYPE_CHECKING:
    from engine.actions.images import StoreImages
    from engine.deadline import PausableClocks
    from engine.episode.compiled import CompiledSpec
    from engine.store.journal import Journal, MemoryJournal
    from engine.store.writer import Write


_UNTIMED = nullcontext()


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
        store_images: StoreImages | None = None,
        clocks: PausableClocks | None = None,
    ) -> None:
        """Drive episodes of a compiled spec.

        Args:
            compiled: The spec.
            watch: Called at each transition.
            store_images: Stores the images that records bring.
            clocks: Paused while no server is reachable; the episodes' clocks are added to it.
        """
        limits = compiled.spec.limits
        self._compiled = compiled
        self._seconds = limits.episode_seconds
        self._watch = watch
        self._store_images = store_images
        self._clocks = clocks
        self._cut = None if limits.tool_result_tokens is None else TextCutter(limits, compiled.template).cut

    async def run(self, episode: Episode, objects: EpisodeObjects, journal: Journal | MemoryJournal) -> None:
        """Drive the episode to its end. The journal then holds its last entry. An error is stored in the episode's `failure`.

        Raises:
            LoopReplacedError: its objects are bound to an event loop that another call blocked; the episode can be
                resumed from its journal, with new objects.
        """
        if self._seconds is None:
            await self._steps(episode, objects, journal, None)
            return
        clock = EpisodeDeadline(self._seconds, time.time() - episode.started)
        clocks = self._clocks
        if clocks is not None:
            clocks.add(clock)
        try:
            await self._steps(episode, objects, journal, clock)
        finally:
            if clocks is not None:
                clocks.remove(clock)
            clock.stop()

    async def _steps(
        self,
        episode: Episode,
        objects: EpisodeObjects,
        journal: Journal | MemoryJournal,
        clock: EpisodeDeadline | None,
    ) -> None:
        compiled = self._compiled
        pending: Write | None = None
        """The newest entry, until it is durable."""
        while True:
            action = compiled.actions.get(episode.state)
            if episode.state in compiled.ends:
                return
            if pending is not None:
                if pending.durable:
                    pending = None
                elif pending.parked or action is None or not action.pipelined(episode, objects):
                    await pending
                    pending = None
            at = time.time()
            began = time.perf_counter()
            stood = 0.0 if clock is None else clock.stood
            try:
                record = await self._perform(episode, objects, clock, began)
            except LoopReplacedError:  # a resume reads the journal
                if pending is not None:
                    await pending
                raise
            seconds = time.perf_counter() - began
            if clock is not None and clock.stood != stood:  # waiting for a server does not count as time of the episode
                seconds -= clock.stood - stood
            if pending is not None and not pending.durable and isinstance(record, GenerationRecord):
                await pending
            entry, encoded = self._fed(episode, record, at, seconds)
            if entry.dest in self._compiled.ends:
                journal.hold(entry, encoded)
                return
            pending = journal.append(entry, encoded)

    async def run_failed(
        self, episode: Episode, objects: EpisodeObjects, journal: Journal | MemoryJournal, error: EngineError
    ) -> None:
        """Run an episode whose objects could not be built: its current state fails, and the episode continues. See `run`."""
        record = FailureRecord(failure=episode.failure_of(error), built=False)
        entry, encoded = self._fed(episode, record, time.time(), 0.0)
        if entry.dest in self._compiled.ends:
            journal.hold(entry, encoded)
            return
        await journal.append(entry, encoded)
        await self.run(episode, objects, journal)

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

    async def _perform(
        self, episode: Episode, objects: EpisodeObjects, clock: EpisodeDeadline | None, now: float
    ) -> Record:
        """The record of this state: the action's result, or the limit or failure that prevented it."""
        state, compiled = episode.state, self._compiled
        action, final = compiled.actions.get(state), state in compiled.machine.final
        try:
            if action is None:
                raise SpecCodeError(
                    f"state `{state}` has no action and is not final; give it one",
                    blame="spec",
                    kind="no_action",
                )
            if episode.seq >= MAX_STEPS:
                raise SpecCodeError(
                    f"{MAX_STEPS} steps without reaching a final state: bound the machine's cycles with a limit",
                    blame="spec",
                    kind="unbounded",
                )
            timed = None if final else clock
            if timed is not None and timed.passed(now):
                return LimitRecord(limit=EPISODE_SECONDS.name, value=timed.spent(now))
            if (preparing := action.prepare(episode)) is not None:
                await preparing
            reached = None if final else action.limit(episode)
            if state in compiled.makes_room and (reached is None or reached[0] in {"images", *PROMPT_LIMITS}):
                full = action.overflow(episode)
                if full is not None:
                    return LimitRecord(limit=full[0], value=full[1], overflow=True)
            if reached is not None:
                return LimitRecord(limit=reached[0], value=float(reached[1]))
            try:
                with timed or _UNTIMED:
                    record = await action.perform(episode, objects)
                    if self._cut is not None:
                        record = self._cut(record)
                    if self._store_images is None or isinstance(
                        record, GenerationRecord
                    ):  # a model's reply has no images
                        return record
                    stored = self._store_images(episode, record)
                    return record if stored is None else await stored
            except TimeoutError:
                if timed is None or not timed.over:
                    raise
                return LimitRecord(limit=EPISODE_SECONDS.name, value=self._seconds or 0.0, began=True)
        except LoopReplacedError as error:
            if error.repeatable:
                raise
            return FailureRecord(failure=episode.failure_of(error))
        except ContextOverflow:
            return LimitRecord(limit=CONTEXT.name, value=float(episode.conversation.length))
        except EngineError as error:
            if error.stops_run:
                raise
            return FailureRecord(failure=episode.failure_of(error))
        except Exception as error:  # noqa: BLE001  (an error of the engine must not end the other episodes)
            return FailureRecord(failure=episode.unexpected(error))

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
        now = time.perf_counter()
        objects.repeating = record
        again = _encoded(await self._perform(episode, objects, None, now), episode)
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
    """A record's content for comparison, without durations, tracebacks, what a program printed and which replies it did not wait for."""
    told = record.plain()
    for result in told.get("results", ()):
        result.pop("seconds", None)
    told.get("failure", {}).pop("trace", None)
    for name in ("output", "unreceived"):
        told.pop(name, None)
    return told
