"""Which sequence stands in which row of the cache, and what a new request need not compute.

A row outlives its request: when a reply is done its keys and values stay, and the episode's next turn computes
only what is new. A request of another episode copies the longest prefix that any row, or any stash, has in
common with it (few-shot prompts and the samples of one task share most of their tokens). When rows run out the
one that was used longest ago is stashed, in a compact copy, up to a budget of bytes.

Invariant: `row.cached` tokens of `row.ids` are in the cache, and never more than the row's length.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from engine.backends.local.kv import KVRows, Stash
from engine.backends.local.sampler import SamplingState
from engine.backends.stops import StopStrings
from engine.schemas.generation import GenerateRequest, Generation, VersionSpan

WORTH_WAITING = 64
"""A request waits for a prefix that another one is computing if that saves it so many tokens."""
WORTH_COPYING = 8
"""A shorter common prefix is computed anew."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    sampling: SamplingState
    stops: StopStrings
    most: int
    """Tokens that may be sampled."""
    queued: float = field(default_factory=time.perf_counter)
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """One row of the cache, and the reply that is made in it, if any."""

    index: int
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Prompt and reply; room for the longest reply."""
    length: int = 0
    cached: int = 0
    used: int = 0
    """When it was last used, in ticks."""
    episode: str | None = None
    """The episode that may come back to it."""
    ticket: Ticket | None = None
    prompt: int = 0
    reused: int = 0
    """Tokens of the prompt that were not computed."""
    began: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether a reply is being made."""
        return self.ticket is not None

    @property
    def known(self) -> np.ndarray:
        """The tokens, shape [tokens], without the room for more."""
        return self.ids[: self.length]

    @property
    def sampled(self) -> int:
        """Tokens of the reply so far."""
        return self.length - self.prompt

    def begin(self, ticket: Ticket, reused: int, tick: int) -> None:
        """Take up a request of whose prompt `reused` tokens are in the cache."""
        prompt = ticket.request.input_ids
        self.ids = np.zeros(len(prompt) + ticket.most, dtype=np.int32)
        self.ids[: len(prompt)] = prompt
        self.length = self.prompt = len(prompt)
        self.cached = self.reused = reused
        self.used, self.episode, self.ticket = tick, ticket.request.episode_id, ticket
        self.began = time.perf_counter()
        self.logprobs, self.versions = [], []

    def push(self, token: int, logprob: float, version: int) -> None:
        """Append a sampled token."""
        place = self.sampled
        self.ids[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = VersionSpan(version=version, start=self.versions[-1].start, end=place + 1)
        else:
            self.versions.append(VersionSpan(version=version, start=place, end=place + 1))


@dataclass(slots=True)
class _Shelved:
    ids: np.ndarray
    stash: Stash
    episode: str | None


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two sequences, of shapes [n] and [m], begin with in common."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


class RowTable:
    """All rows, and the shelf of stashes."""

    def __init__(self, store: KVRows, count: int, shelf_bytes: int) -> None:
        self.rows = [Row(index) for index in range(count)]
        self.counts: Counter[str] = Counter()
        self._store = store
        self._shelf: OrderedDict[int, _Shelved] = OrderedDict()
        self._shelf_bytes = shelf_bytes
        self._held = 0
        self._tick = 0
        self._over: set[str] = set()

    @property
    def running(self) -> list[Row]:
        """Rows in which replies are being made, by index."""
        return [row for row in self.rows if row.running]

    @property
    def shelved_bytes(self) -> int:
        """Memory that the shelf takes."""
        return self._held

    def admit(self, ticket: Ticket) -> Row | None:
        """Give a request its row; None where it should wait: no row is free, or its prefix is being computed."""
        prompt = ticket.request.input_ids
        free = [row for row in self.rows if not row.running]
        if not free:
            return None
        usable = len(prompt) - 1  # the last token is always computed: its logits are what is asked for
        own = next((row for row in free if row.episode == ticket.request.episode_id and row.cached), None)
        if own is not None and (kept := min(usable, common_prefix(own.known[: own.cached], prompt))) == own.cached:
            return self._begin(own, ticket, kept)
        source, kept = self._best_row(prompt, usable)
        key, shelved = self._best_shelved(prompt, usable)
        if self._coming(prompt) - max(kept, shelved) >= WORTH_WAITING:
            return None
        self._store.reserve(len(prompt))
        if shelved > kept and key is not None:
            held = self._shelf[key]  # it may fall off the shelf when a row is stashed
            row = self._vacate(free, None)
            self._store.put(row.index, held.stash, shelved)
            if held.episode == ticket.request.episode_id:
                self._drop(key)
            elif key in self._shelf:
                self._shelf.move_to_end(key)
            return self._begin(row, ticket, shelved)
        if source is None or kept < WORTH_COPYING:
            return self._begin(self._vacate(free, None), ticket, 0)
        if not source.running and source.episode == ticket.request.episode_id:
            return self._begin(source, ticket, kept)  # its own, grown apart: what follows the prefix is written over
        row = self._vacate(free, source)
        if row is not source:
            self._store.copy(source.index, row.index, kept)
        return self._begin(row, ticket, kept)

    def rest(self, row: Row) -> None:
        """The row's reply is over; its tokens stay."""
        row.ticket = None
        row.used = self._next_tick()
        if row.episode in self._over:
            self._over.discard(row.episode)
            row.episode = None

    def release(self, episode: str) -> None:
        """The episode is over: nobody comes back to what is kept for it."""
        for key in [key for key, held in self._shelf.items() if held.episode == episode]:
            self._drop(key)
        for row in self.rows:
            if row.episode == episode:
                if row.running:
                    self._over.add(episode)
                else:
                    row.episode = None

    def forget(self) -> None:
        """All that is cached is void (new weights, or a failed pass): running rows begin anew."""
        self._shelf.clear()
        self._held = 0
        for row in self.rows:
            row.cached = 0
            if not row.running:
                row.length = 0
                row.episode = None

    def _begin(self, row: Row, ticket: Ticket, kept: int) -> Row:
        kept = kept if kept >= WORTH_COPYING else 0
        row.begin(ticket, kept, self._next_tick())
        self.counts["cached_tokens"] += kept
        return row

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _best_row(self, prompt: np.ndarray, usable: int) -> tuple[Row | None, int]:
        """The row with the longest cached prefix of the prompt."""
        best, kept = None, 0
        for row in self.rows:
            if row.cached > kept and (shared := common_prefix(row.known[: row.cached], prompt)) > kept:
                best, kept = row, shared
        return best, min(kept, usable)

    def _best_shelved(self, prompt: np.ndarray, usable: int) -> tuple[int | None, int]:
        best, kept = None, 0
        for key, held in self._shelf.items():
            if len(held.ids) > kept and (shared := common_prefix(held.ids, prompt)) > kept:
                best, kept = key, shared
        return best, min(kept, usable)

    def _coming(self, prompt: np.ndarray) -> int:
        """The longest prefix of the prompt that some row is about to have."""
        pending = (row for row in self.rows if row.running and row.cached < row.prompt)
        return max((common_prefix(row.known, prompt) for row in pending), default=0)

    def _vacate(self, free: list[Row], source: Row | None) -> Row:
        """A row to write over: an empty one, one that nobody comes back to, or the one used longest ago.

        `source`, which is copied from, is given up last.
        """
        row = min(free, key=lambda row: (row is source, row.cached > 0, row.episode is not None, row.used, row.index))
        if row.cached and row.episode is not None:
            self._stash(row)
        return row

    def _stash(self, row: Row) -> None:
        stash = self._store.take(row.index, row.cached)
        if stash.bytes > self._shelf_bytes:
            return
        self.counts["stashed"] += 1
        self._shelf[self._next_tick()] = _Shelved(row.known[: row.cached].copy(), stash, row.episode)
        self._held += stash.bytes
        while self._held > self._shelf_bytes:
            self._drop(next(iter(self._shelf)))
            self.counts["evicted"] += 1

    def _drop(self, key: int) -> None:
        if (held := self._shelf.pop(key, None)) is not None:
            self._held -= held.stash.bytes
