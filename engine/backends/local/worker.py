"""The thread that owns the model: continuous batching of every request in flight.

One step: take in what has arrived, give requests rows, compute one forward pass over the newest token of every
running reply together with pieces of new prompts, sample, and answer what is done. A reply that ends frees its
row at once; nobody waits for a batch to end.

Invariant: only this thread touches the model and the rows. A future gets exactly one answer, whatever happens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch

from engine.backends.local.kv import Chunk
from engine.backends.local.load import PackedModel
from engine.backends.local.rows import Row, RowTable, Ticket
from engine.backends.local.sampler import sample, sample_each
from engine.backends.stops import finish_reason
from engine.errors import BackendError, EngineError
from engine.schemas.generation import FinishReason, Generation

log = structlog.get_logger(__name__)

Answer = tuple["asyncio.Future[Any]", Any]
"""A future, and its result or exception."""


@dataclass(slots=True, eq=False)
class Command:
    """Something to be done between two steps."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Worker:
    """Runs in its own thread from `start` to `stop`; the other methods are called from event loops."""

    def __init__(self, load: Callable[[], tuple[PackedModel, RowTable]], prefill_tokens: int | None = None) -> None:
        """
        Args:
            load: Called in the thread: makes the model and its rows.
            prefill_tokens: Prompt tokens in one pass, at most; by device when left out.
        """
        self._load = load
        self._prefill_tokens = prefill_tokens
        self._inbox: deque[Ticket | Command] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dead: BackendError | None = None
        self._waiting: deque[Ticket] = deque()
        self._answers: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
        self._thread: threading.Thread | None = None
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"forward": 0.0, "sample": 0.0}
        self.packed: PackedModel
        self.table: RowTable

    def start(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        """Begin the thread; `ready` is answered when the model is loaded."""
        self._thread = threading.Thread(target=self._main, args=(loop, ready), name="local-backend", daemon=True)
        self._thread.start()

    def submit(self, item: Ticket | Command) -> None:
        """Hand something over.

        Raises:
            BackendError: The backend is closed.
        """
        with self._wake:
            if self._dead is not None:
                raise self._dead
            self._inbox.append(item)
            self._wake.notify()

    def nudge(self) -> None:
        """A ticket was cancelled: look at the next step, or now where nothing runs."""
        with self._wake:
            self._wake.notify()

    def end(self) -> None:
        """Tell the thread to end; what is in flight fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def stop(self) -> None:
        """End the thread, and return when it has ended."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _main(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        try:
            self.packed, self.table = self._load()
        except Exception as error:  # noqa: BLE001  whatever it is, `start` raises it
            reason = f"the local backend could not be started: {type(error).__name__}: {error}"
            self._die(BackendError(reason, kind="not_started"))
            self._answer(
                loop, ready, error if isinstance(error, EngineError) else BackendError(reason, kind="not_started")
            )
            self._flush()
            return
        if self._prefill_tokens is None:
            self._prefill_tokens = 512 if self.packed.device.type == "cpu" else 4096
        self._answer(loop, ready, None)
        self._flush()
        while self._take_in():
            try:
                with torch.inference_mode():
                    self._step()
            except Exception as error:
                log.exception("a step of the local backend failed")
                self._fail_running(error)
            self._flush()
        self._die(BackendError("the local backend was closed", kind="closed"))

    def _take_in(self) -> bool:
        """Wait for work and sort what has arrived; False when it is time to end."""
        with self._wake:
            while not (self._inbox or self._closing or self._waiting or self.table.running):
                self._wake.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for item in arrived:
            if isinstance(item, Ticket):
                self._waiting.append(item)
                continue
            try:
                self._answer(item.loop, item.future, item.run())
            except Exception as error:  # noqa: BLE001  the caller gets it
                self._answer(item.loop, item.future, error)
        return not closing

    def _step(self) -> None:
        for row in self.table.running:
            if row.ticket is not None and row.ticket.cancelled:
                self.counts["cancelled"] += 1
                self.table.rest(row)
        self._admit()
        chunks, rows = self._plan()
        if not chunks:
            return
        began = time.perf_counter()
        wanted = [place for place, (chunk, row) in enumerate(zip(chunks, rows, strict=True)) if _completes(chunk, row)]
        logits = self.packed.forward(chunks, wanted)
        for chunk, row in zip(chunks, rows, strict=True):
            row.cached = chunk.past + len(chunk.ids)
        computed = time.perf_counter()
        self._sample(logits, [rows[place] for place in wanted])
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(wanted)
        self.counts["prompt_tokens"] += sum(len(chunk.ids) for chunk in chunks if len(chunk.ids) > 1)
        self.seconds["forward"] += computed - began
        self.seconds["sample"] += time.perf_counter() - computed

    def _admit(self) -> None:
        """Give rows to waiting requests, first come first served but for those that wait for a prefix."""
        later: deque[Ticket] = deque()
        while self._waiting:
            ticket = self._waiting.popleft()
            if ticket.cancelled:
                self.counts["cancelled"] += 1
                continue
            try:
                row = self.table.admit(ticket)
            except Exception as error:
                log.exception("a request could not be given a row")
                failure = BackendError(f"no room for the request: {type(error).__name__}: {error}", kind="step_failed")
                self._answer(ticket.loop, ticket.future, failure)
                continue
            if row is not None:
                self.counts["requests"] += 1
                continue
            later.append(ticket)
            if len(self.table.running) == len(self.table.rows):
                break
        later.extend(self._waiting)
        self._waiting = later

    def _plan(self) -> tuple[list[Chunk], list[Row]]:
        """This step's pieces: one token of each running reply, then prompts, the oldest first, as far as they fit."""
        singles: list[Row] = []
        longer: list[Row] = []
        room = self._prefill_tokens or 1
        for row in self.table.running:
            (singles if row.length - row.cached == 1 else longer).append(row)
        chunks = [Chunk(row.index, [int(row.ids[row.cached])], row.cached) for row in singles]
        taken: list[Row] = []
        for row in sorted(longer, key=lambda row: row.began):
            count = min(row.length - row.cached, room)
            if count <= 0:
                break
            chunk = Chunk(row.index, row.ids[row.cached : row.cached + count].tolist(), row.cached)
            room -= count
            if count == 1:  # the last token of room: among the single ones, in its place
                at = next((place for place, other in enumerate(singles) if other.index > row.index), len(singles))
                chunks.insert(at, chunk)
                singles.insert(at, row)
            else:
                chunks.append(chunk)
                taken.append(row)
        return chunks, [*singles, *taken]

    def _sample(self, logits: Any, rows: list[Row]) -> None:
        if not rows:
            return
        tickets = [row.ticket for row in rows if row.ticket is not None]
        states, places = [ticket.sampling for ticket in tickets], [row.sampled for row in rows]
        drawn = sample_each(logits, states, places) if self.packed.repeatable else sample(logits, states, places)
        for row, ticket, token, logprob in zip(rows, tickets, drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True):
            if not np.isfinite(logprob):
                message = "the model gave no distribution (nan, or every token banned)"
                self._answer(ticket.loop, ticket.future, BackendError(message, kind="bad_logits"))
                self.table.rest(row)
                continue
            row.push(token, logprob, self.version)
            ticket.sampling.said(token)
            self.counts["tokens"] += 1
            output_ids = row.ids[row.prompt : row.length]
            if (finish := finish_reason(ticket.request, output_ids, ticket.most, ticket.stops)) is not None:
                self._answer(ticket.loop, ticket.future, self._generation(row, ticket, finish))
                self.table.rest(row)

    def _generation(self, row: Row, ticket: Ticket, finish: FinishReason) -> Generation:
        return Generation(
            output_ids=row.ids[row.prompt : row.length].copy(),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            finish=finish,
            versions=row.versions,
            prompt_tokens=row.prompt,
            cached_tokens=row.reused,
            seconds=time.perf_counter() - ticket.queued,
            queue_seconds=row.began - ticket.queued,
        )

    def _fail_running(self, error: Exception) -> None:
        """A pass failed: its rows may be half written, so they all go, and nothing cached is trusted."""
        for row in self.table.running:
            if (ticket := row.ticket) is not None:
                failure = BackendError(f"the model's pass failed: {type(error).__name__}: {error}", kind="step_failed")
                self._answer(ticket.loop, ticket.future, failure)
            self.table.rest(row)
        self.table.forget()

    def _die(self, reason: BackendError) -> None:
        with self._wake:
            self._dead = reason
            left = [*self._waiting, *self._inbox]
            self._inbox.clear()
        self._waiting.clear()
        running = [row.ticket for row in self.table.running if row.ticket is not None] if hasattr(self, "table") else []
        for item in [*left, *running]:
            self._answer(item.loop, item.future, BackendError(str(reason), kind=reason.kind))
        self._flush()

    def _answer(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
        self._answers.setdefault(loop, []).append((future, result))

    def _flush(self) -> None:
        """Hand over the step's answers: one wake-up for each event loop."""
        answers, self._answers = self._answers, {}
        for loop, given in answers.items():
            with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_resolve, given)


def _completes(chunk: Chunk, row: Row) -> bool:
    """Whether the chunk holds the row's newest token, whose logits give the next one."""
    return chunk.past + len(chunk.ids) == row.length


def _resolve(answers: list[Answer]) -> None:
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
