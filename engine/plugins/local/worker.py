"""The thread that owns the model: continuous batching of every request in flight.

One step: receive new requests, assign rows to them, compute one forward pass over the newest token of every running
reply and chunks of new prompts, sample, and return the complete replies. A reply that ends frees its row at once, so
no request waits for a batch to end.

Invariant: only this thread touches the model and the rows. Each future gets exactly one result or exception.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import structlog
import torch

from engine.backends.stops import finish_reason
from engine.errors import BackendError, EngineError
from engine.plugins.local.kv import RowChunk
from engine.plugins.local.load import BatchedModel
from engine.plugins.local.rows import CacheRow, PendingReply, RowTable
from engine.plugins.local.sampler import sample, sample_each
from engine.schemas.experts import expert_dtype
from engine.schemas.generation import FinishReason, Generation

log = structlog.get_logger(__name__)

Command = tuple[Callable[[], Any], Future[Any]]
"""A function to call in the thread between two steps, and its result."""


class SamplingWorker:
    """Runs in its own thread from `start` to `stop`; the other methods are called from event loops."""

    def __init__(self, load: Callable[[], tuple[BatchedModel, RowTable]], prefill_tokens: int | None = None) -> None:
        """
        Args:
            load: Makes the model and its rows; called in the thread.
            prefill_tokens: Maximum number of prompt tokens in one pass. Default: 512 on a CPU, 4096 on a GPU.
        """
        self._load = load
        self._prefill_tokens = prefill_tokens
        self._inbox: deque[PendingReply | Command] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._closed: BackendError | None = None
        self._waiting: deque[PendingReply] = deque()
        self._answers: list[tuple[Future[Any], Any]] = []
        """The step's results and exceptions."""
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"forward": 0.0, "sample": 0.0}
        self.packed: BatchedModel
        self.table: RowTable
        self._thread: threading.Thread

    def start(self, ready: Future[None]) -> None:
        """Start the thread. `ready` gets its result when the model is loaded."""
        self._thread = threading.Thread(target=self._main, args=(ready,), name="local-backend", daemon=True)
        self._thread.start()

    def submit(self, item: PendingReply | Command) -> None:
        """Queue a request or a command for the next step.

        Raises:
            BackendError: The backend is closed.
        """
        with self._wake:
            if self._closed is not None:
                raise self._closed
            self._inbox.append(item)
            self._wake.notify()

    def call(self, run: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function in the thread, before the next step. Raises: BackendError: The backend is closed."""
        future: Future[Any] = Future()
        self.submit((run, future))
        return asyncio.wrap_future(future)

    def wake(self) -> None:
        """Wake the thread, so that it removes a cancelled request even if nothing runs."""
        with self._wake:
            self._wake.notify()

    def end(self) -> None:
        """Ask the thread to end. Requests in flight fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self.end()
        self._thread.join()

    def _main(self, ready: Future[None]) -> None:
        try:
            self.packed, self.table = self._load()
        except Exception as error:  # noqa: BLE001  `start` raises every error
            reason = f"the local backend cannot start: {type(error).__name__}: {error}"
            self._fail_all(BackendError(reason, kind="not_started"))
            known = isinstance(error, EngineError)
            self._answers.append((ready, error if known else BackendError(reason, kind="not_started")))
            self._flush()
            return
        if not self.packed.reuses_prefixes:
            self._prefill_tokens = 1 << 30  # each prompt is one chunk, however many prompts a step has
        if self._prefill_tokens is None:
            self._prefill_tokens = 512 if self.packed.device.type == "cpu" else 4096
        self._answers.append((ready, None))
        self._flush()
        while self._receive():
            try:
                with torch.inference_mode():
                    self._step()
            except Exception as error:
                log.exception("a step of the local backend failed")
                reason = f"the model's forward pass failed: {type(error).__name__}: {error}"
                for row in self.table.running:
                    if (pending := row.pending) is not None:
                        self._answers.append((pending.future, BackendError(reason, kind="step_failed")))
                    self.table.finish(row)
                self.table.clear()  # rows may be partly written
            self._flush()
        self._fail_all(BackendError("the local backend was closed", kind="closed"))

    def _receive(self) -> bool:
        """Wait for requests and commands, run the commands, and queue the requests. Returns False if the thread must
        end."""
        with self._wake:
            while not (self._inbox or self._closing or self._waiting or self.table.running):
                self._wake.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for item in arrived:
            if isinstance(item, PendingReply):
                self._waiting.append(item)
                continue
            run, future = item
            try:
                self._answers.append((future, run()))
            except Exception as error:  # noqa: BLE001  the caller gets the error
                self._answers.append((future, error))
        return not closing

    def _step(self) -> None:
        for row in self.table.running:
            if row.pending is not None and row.pending.cancelled:
                self.counts["cancelled"] += 1
                self.table.finish(row)
        self._admit()
        chunks, rows = self._plan()
        if not chunks:
            return
        began = time.perf_counter()
        pairs = list(zip(chunks, rows, strict=True))
        # the logits of a row's newest token give the next token
        wanted = [place for place, (chunk, row) in enumerate(pairs) if chunk.past + len(chunk.ids) == row.length]
        logits = self.packed.forward(chunks, wanted)
        for chunk, row in pairs:
            row.cached = chunk.past + len(chunk.ids)
        computed = time.perf_counter()
        self._sample(logits, [rows[place] for place in wanted])
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(wanted)
        self.counts["prompt_tokens"] += sum(len(chunk.ids) for chunk in chunks if len(chunk.ids) > 1)
        self.seconds["forward"] += computed - began
        self.seconds["sample"] += time.perf_counter() - computed

    def _admit(self) -> None:
        """Assign rows to waiting requests in order of arrival. Requests that wait for a prefix are skipped."""
        later: deque[PendingReply] = deque()
        while self._waiting:
            pending = self._waiting.popleft()
            if pending.cancelled:
                self.counts["cancelled"] += 1
                continue
            try:
                row = self.table.admit(pending)
            except Exception as error:
                log.exception("a row could not be assigned to a request")
                reason = f"a row could not be assigned to the request: {type(error).__name__}: {error}"
                self._answers.append((pending.future, BackendError(reason, kind="step_failed")))
                continue
            if row is not None:
                self.counts["requests"] += 1
                continue
            later.append(pending)
            if len(self.table.running) == len(self.table.rows):
                break
        later.extend(self._waiting)
        self._waiting = later

    def _plan(self) -> tuple[list[RowChunk], list[CacheRow]]:
        """Plan the step's chunks: one token of each running reply, then prompts, oldest first, up to `prefill_tokens`.

        An image is never split between steps.
        """
        running, room = self.table.running, self._prefill_tokens or 1
        planned = [(row, 1) for row in running if row.length - row.cached == 1]
        for row in sorted((row for row in running if row.length - row.cached != 1), key=lambda row: row.began):
            count = row.next_tokens(room, first=room == self._prefill_tokens)
            if count <= 0:
                break
            room -= count
            planned.append((row, count))
        # chunks of one token, to which a prompt may have been cut as well, come first and are ordered by row
        planned.sort(key=lambda of_row: of_row[0].index if of_row[1] == 1 else len(self.table.rows))
        chunks = [
            RowChunk(
                row=row.index,
                ids=row.ids[row.cached : row.cached + count].tolist(),
                past=row.cached,
                images=row.pending.images if row.pending is not None else None,
            )
            for row, count in planned
        ]
        return chunks, [row for row, _ in planned]

    def _sample(self, logits: Any, rows: list[CacheRow]) -> None:
        if not rows:
            return
        replies = [row.pending for row in rows if row.pending is not None]
        states, places = [pending.sampling for pending in replies], [row.sampled for row in rows]
        draw = sample_each if self.packed.repeatable else sample
        ids, logprobs = draw(logits, states, places)
        for row, pending, token, logprob in zip(rows, replies, ids.tolist(), logprobs.tolist(), strict=True):
            if not np.isfinite(logprob):
                reason = "the model's logits are not a distribution (nan, or every token is banned)"
                self._answers.append((pending.future, BackendError(reason, kind="bad_logits")))
                self.table.finish(row)
                continue
            row.push(token, logprob, self.version)
            pending.sampling.count(token)
            self.counts["tokens"] += 1
            output_ids = row.ids[row.prompt : row.length]
            if (finish := finish_reason(pending.request, output_ids, pending.most, pending.stops)) is not None:
                self._answers.append((pending.future, self._generation(row, pending, finish)))
                self.table.finish(row)

    def _generation(self, row: CacheRow, pending: PendingReply, finish: FinishReason) -> Generation:
        layout, start, experts = self.packed.layout, pending.request.experts_from, None
        if layout is not None and start is not None:  # those of all tokens but the last, which no pass has read
            chosen = self.packed.store.experts_of(row.index, start, row.length - 1)
            experts = chosen.cpu().numpy().astype(expert_dtype(layout.experts).newbyteorder("="))
        return Generation(
            output_ids=row.ids[row.prompt : row.length].copy(),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            finish=finish,
            versions=row.versions,
            prompt_tokens=row.prompt,
            cached_tokens=row.reused,
            routed_experts=experts,
            seconds=time.perf_counter() - pending.queued,
            queue_seconds=row.began - pending.queued,
        )

    def _fail_all(self, reason: BackendError) -> None:
        with self._wake:
            self._closed = reason
            left = [*self._waiting, *self._inbox]
            self._inbox.clear()
        self._waiting.clear()
        running = (
            [row.pending for row in self.table.running if row.pending is not None] if hasattr(self, "table") else []
        )
        for item in [*left, *running]:
            future = item.future if isinstance(item, PendingReply) else item[1]
            self._answers.append((future, BackendError(str(reason), kind=reason.kind)))
        self._flush()

    def _flush(self) -> None:
        """Deliver the step's results, except to callers that were cancelled."""
        answers, self._answers = self._answers, []
        for future, result in answers:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
