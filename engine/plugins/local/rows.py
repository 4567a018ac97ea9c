"""The sequence in each row of the cache, and the choice of the cached prefix that a new request reuses.

A row outlives its request: when a reply is complete, its keys and values stay, and the episode's next turn
computes only its new tokens. A request of another episode copies the longest prefix that it has in common with
any row or any stash (few-shot prompts and the samples of one task share most of their tokens). When no row is free, the
least recently used row is copied to a stash (compact, up to a budget of bytes) and reused.

Invariant: `row.cached` tokens of `row.ids` are in the cache, and never more than the row's length.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from engine.backends.stops import StopStrings
from engine.plugins.local.kv import KVRows, PromptImages, Stash
from engine.plugins.local.sampler import SamplingState
from engine.schemas.generation import GenerateRequest, Generation, VersionSpan

K = TypeVar("K")

MIN_TOKENS_TO_WAIT = 64
"""A request waits for a prefix that another request is computing if this saves at least this many tokens."""
MIN_TOKENS_TO_COPY = 8
"""Minimum length of a common prefix to reuse; a shorter one is computed again."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A request whose reply is not complete."""

    request: GenerateRequest
    future: Future[Generation]
    sampling: SamplingState
    stops: StopStrings
    most: int
    """Maximum number of sampled tokens."""
    queued: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    images: PromptImages | None = None
    """The images of the prompt."""

    @property
    def prompt(self) -> np.ndarray:
        """The prompt, int32 [tokens]; an image's placeholders are marks of this image, so equal tokens mean equal
        inputs."""
        return self.request.input_ids if self.images is None else self.images.marked


@dataclass(slots=True, eq=False)
class CacheRow:
    """One row of the cache, and the reply that is sampled in it, if any."""

    index: int
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Prompt (see `PendingReply.prompt`) and reply, allocated for the longest possible reply."""
    length: int = 0
    cached: int = 0
    used: int = 0
    """Tick of the last use."""
    episode: str | None = None
    """The episode whose next turn may reuse the row; None: no episode will."""
    pending: PendingReply | None = None
    prompt: int = 0
    reused: int = 0
    """Number of prompt tokens that were in the cache."""
    began: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    @property
    def known(self) -> np.ndarray:
        """The tokens so far, shape [tokens]."""
        return self.ids[: self.length]

    @property
    def sampled(self) -> int:
        """Number of sampled tokens so far."""
        return self.length - self.prompt

    def next_tokens(self, most: int, *, first: bool) -> int:
        """Number of tokens to compute next, at most `most`. An image is computed as a whole: alone if it is larger, and
        only if `first`."""
        count = min(self.length - self.cached, most)
        images = self.pending.images if self.pending is not None else None
        if images is None or count <= 0:
            return count
        end = images.whole(self.cached + count)
        return (images.end(self.cached) if end <= self.cached and first else end) - self.cached

    def begin(self, pending: PendingReply, reused: int, tick: int) -> None:
        """Begin a request; the first `reused` tokens of its prompt are in the cache."""
        prompt = pending.prompt
        self.ids = np.zeros(len(prompt) + pending.most, dtype=np.int32)
        self.ids[: len(prompt)] = prompt
        self.length = self.prompt = len(prompt)
        self.cached = self.reused = reused
        self.used, self.episode, self.pending = tick, pending.request.episode_id, pending
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
class _Stashed:
    ids: np.ndarray
    stash: Stash
    bytes: int
    episode: str | None


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two sequences, shapes [n] and [m]."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


class RowTable:
    """All rows and all stashes."""

    def __init__(self, store: KVRows, count: int, stash_bytes: int, *, reuse: bool = True) -> None:
        """
        Args:
            store: The cache.
            count: Number of rows.
            stash_bytes: Maximum memory of all stashes.
            reuse: Whether a request may reuse cached prefixes.
        """
        self.rows = [CacheRow(index) for index in range(count)]
        self.counts: Counter[str] = Counter()
        self._store = store
        self._stashes: OrderedDict[int, _Stashed] = OrderedDict()
        self._stash_bytes = stash_bytes
        self.stashed_bytes = 0
        """Memory of all stashes."""
        self._ticks = itertools.count(1)
        self._over: set[str] = set()
        self._reuse = reuse

    @property
    def running(self) -> list[CacheRow]:
        """Rows in which replies are being sampled, by index."""
        return [row for row in self.rows if row.pending is not None]

    def admit(self, pending: PendingReply) -> CacheRow | None:
        """Assign a row to a request. None if it must wait: no row is free, or another row is computing its prefix."""
        prompt = pending.prompt
        free = [row for row in self.rows if row.pending is None]
        if not free:
            return None
        if not self._reuse:
            return self._begin(free[0], pending, 0)
        usable = len(prompt) - 1  # the last token is always computed, because sampling needs its logits
        own = next((row for row in free if row.episode == pending.request.episode_id and row.cached), None)
        if own is not None and (kept := min(usable, common_prefix(own.known[: own.cached], prompt))) == own.cached:
            return self._begin(own, pending, kept)
        source, kept = self._best(prompt, ((row, row.known[: row.cached]) for row in self.rows))
        key, stashed = self._best(prompt, ((key, held.ids) for key, held in self._stashes.items()))
        computing = (row for row in self.running if row.cached < row.prompt)
        in_progress = max((common_prefix(row.known, prompt) for row in computing), default=0)
        if in_progress - max(kept, stashed) >= MIN_TOKENS_TO_WAIT:
            return None
        self._store.reserve(len(prompt))
        if stashed > kept and key is not None:
            held = self._stashes[key]  # read now: stashing a row may evict it
            row = self._reusable_row(free, None)
            self._store.put(row.index, held.stash, stashed)
            if held.episode == pending.request.episode_id:
                self._drop(key)
            elif key in self._stashes:
                self._stashes.move_to_end(key)
            return self._begin(row, pending, stashed)
        if source is None or kept < MIN_TOKENS_TO_COPY:
            return self._begin(self._reusable_row(free, None), pending, 0)
        if source.pending is None and source.episode == pending.request.episode_id:
            return self._begin(
                source, pending, kept
            )  # the episode's own row, which diverged: tokens after the prefix are overwritten
        row = self._reusable_row(free, source)
        if row is not source:
            self._store.copy(source.index, row.index, kept)
        return self._begin(row, pending, kept)

    def finish(self, row: CacheRow) -> None:
        """End the row's reply. Its tokens stay cached."""
        row.pending = None
        row.used = next(self._ticks)
        if row.episode in self._over:
            self._over.discard(row.episode)
            row.episode = None

    def release(self, episode: str) -> None:
        """Mark an episode as ended: drop its stashes, and let other requests take its row."""
        for key in [key for key, held in self._stashes.items() if held.episode == episode]:
            self._drop(key)
        for row in self.rows:
            if row.episode == episode:
                if row.pending is not None:
                    self._over.add(episode)
                else:
                    row.episode = None

    def clear(self) -> None:
        """Drop everything cached (new weights, or a failed pass). Running rows compute their tokens again."""
        self._stashes.clear()
        self.stashed_bytes = 0
        for row in self.rows:
            row.cached = 0
            if row.pending is None:
                row.length = 0
                row.episode = None

    def _begin(self, row: CacheRow, pending: PendingReply, kept: int) -> CacheRow:
        kept = kept if pending.images is None else pending.images.whole(kept)
        kept = kept if kept >= MIN_TOKENS_TO_COPY else 0
        row.begin(pending, kept, next(self._ticks))
        self.counts["cached_tokens"] += kept
        return row

    @staticmethod
    def _best(prompt: np.ndarray, held: Iterable[tuple[K, np.ndarray]]) -> tuple[K | None, int]:
        """Which sequence has the longest prefix of the prompt, and its length, without the prompt's last token."""
        best, kept = None, 0
        for key, ids in held:
            if len(ids) > kept and (shared := common_prefix(ids, prompt)) > kept:
                best, kept = key, shared
        return best, min(kept, len(prompt) - 1)

    def _reusable_row(self, free: list[CacheRow], source: CacheRow | None) -> CacheRow:
        """Choose a row to overwrite: an empty one, else one of an ended episode, else the least recently used one.

        `source`, from which the prefix is copied, is chosen last.
        """
        row = min(free, key=lambda row: (row is source, row.cached > 0, row.episode is not None, row.used, row.index))
        if row.cached and row.episode is not None:
            self._stash(row)
        return row

    def _stash(self, row: CacheRow) -> None:
        stash = self._store.take(row.index, row.cached)
        size = sum(states.nbytes for states in stash.values())
        if size > self._stash_bytes:
            return
        self.counts["stashed"] += 1
        self._stashes[next(self._ticks)] = _Stashed(row.known[: row.cached].copy(), stash, size, row.episode)
        self.stashed_bytes += size
        while self.stashed_bytes > self._stash_bytes:
            self._drop(next(iter(self._stashes)))
            self.counts["evicted"] += 1

    def _drop(self, key: int) -> None:
        if (held := self._stashes.pop(key, None)) is not None:
            self.stashed_bytes -= held.bytes
