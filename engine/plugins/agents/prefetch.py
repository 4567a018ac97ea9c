"""Samples replies to requests of an agent program while another of its requests is answered.

A reply that was sampled ahead is used only if the prompt, images and sampling of its turn are those that it was sampled
with; so what is recorded is what one request after the other would have given the model. Its seed is that of a turn
number that no other reply of the episode has while it is sampled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import EngineError
from engine.schemas.base import Struct
from engine.schemas.generation import GenerateRequest, Generation

if TYPE_CHECKING:
    from engine.actions.generate import GenerateAction
    from engine.backends.backend import Sampler
    from engine.episode.episode import Episode
    from engine.plugins.agents.inbox import Exchange, Inbox
    from engine.plugins.agents.threads import AgentThreads


class _Source(Struct, frozen=True, kw_only=True):
    """Where the prompts of requests come from."""

    episode: Episode
    threads: AgentThreads
    """Where its requests continue."""
    generate: GenerateAction
    """How a reply is asked for."""
    inbox: Inbox
    """Its requests."""


class PrefetchingSampler:
    """Samples the replies of one episode, and once it follows the episode's program also those to requests that wait.


    Args:
        sampler: Samples replies.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.checks_replies = sampler.checks_replies
        self._source: _Source | None = None
        self._jobs: dict[Exchange, deque[tuple[GenerateRequest, asyncio.Task[Generation]]]] = {}
        """What is sampled ahead: the replies of each request that waits."""
        self._stopped: set[Exchange] = set()
        """Requests that a limit stops, as far as is known."""
        self._next = 0
        """The turn number of the next reply that is sampled ahead."""
        self._current: Exchange | None = None
        self._asked_at = -1
        """The newest turn when the current request was attached."""

    def generate(self, request: GenerateRequest) -> Awaitable[Generation]:
        """The reply that was sampled ahead for this prompt; without one, a new reply."""
        jobs = None if self._current is None else self._jobs.get(self._current)
        if not jobs:
            return self._sampler.generate(request)
        ahead, task = jobs.popleft()
        if (
            np.array_equal(ahead.input_ids, request.input_ids)
            and ahead.images == request.images
            and ahead.sampling == request.sampling
            and ahead.max_new_tokens == request.max_new_tokens
            and ahead.experts_from == request.experts_from
            and ahead.messages == request.messages
            and ahead.tools == request.tools
        ):
            return task
        task.cancel()
        return self._sampler.generate(request)

    def follow(self, episode: Episode, threads: AgentThreads, generate: GenerateAction, inbox: Inbox) -> None:
        """Sample the requests of a program ahead from now on."""
        self._source = _Source(episode=episode, threads=threads, generate=generate, inbox=inbox)

    def begin(self, exchange: Exchange) -> None:
        """Begin to sample the replies to a request, if limits allow it; a second call does nothing."""
        source = self._source
        if source is None or exchange in self._jobs:
            return
        jobs = self._jobs[exchange] = deque()
        asked, episode = exchange.request, source.episode
        try:
            conversation = source.threads.conversation_for(episode, asked, source.generate.vision)
        except EngineError:  # its turn reports it
            return
        if not any(self._jobs.values()):
            self._next = 0
        sampling = self._current is not None and episode.turn == self._asked_at and not self._jobs.get(self._current)
        self._next = max(self._next, episode.turn + 1 + sampling)
        for _ in range(asked.replies):
            request = source.generate.request_ahead(episode, conversation, self._next, asked.sampling)
            if request is None:
                self._stopped.add(exchange)
                return
            self._next += 1
            task = asyncio.ensure_future(self._sampler.generate(request))
            task.add_done_callback(self._done)
            jobs.append((request, task))

    def _done(self, task: asyncio.Task[Generation]) -> None:
        if not task.cancelled():
            task.exception()  # raised again when its turn comes; a reply that is never used fails nothing
        if self._source is not None:
            self._source.inbox.woken.set()

    def has_begun(self, exchange: Exchange) -> bool:
        """Whether a reply to a request is being sampled, or was."""
        return bool(self._jobs.get(exchange))

    def is_ready(self, exchange: Exchange) -> bool:
        """Whether the first reply to a request is there, or its turn must come before it can be sampled."""
        jobs = self._jobs.get(exchange)
        return jobs[0][1].done() if jobs else exchange not in self._stopped

    def answers(self, exchange: Exchange | None) -> None:
        """Note which request the next turns answer; None: none."""
        if self._current is not None and exchange is not self._current:
            for _, task in self._jobs.pop(self._current, ()):
                task.cancel()
        self._current = exchange
        self._asked_at = -1 if self._source is None else self._source.episode.turn

    def close(self) -> None:
        """Give up all replies that are being sampled."""
        for jobs in self._jobs.values():
            for _, task in jobs:
                task.cancel()
        self._jobs.clear()
