"""Samples replies to requests of an agent program while another of its requests is answered.

A reply that was sampled ahead is used only if the prompt, images and sampling of its turn are those that it was sampled with; so
what is recorded is what one request after the other would have given the model. Its seed is that of a turn number that no other
reply of the episode has while it is sampled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.actions.images import in_memory
from engine.errors import EngineError
from engine.schemas.base import Struct
from engine.schemas.generation import GenerateRequest, Generation

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.generate import GenerateAction
    from engine.episode.episode import Episode
    from engine.plugins.agents.inbox import Exchange, Inbox
    from engine.plugins.agents.threads import AgentThreads


class _Job(Struct, frozen=True, kw_only=True):
    request: GenerateRequest
    task: asyncio.Task[Generation]


class AheadSampler:
    """The replies of one episode that are sampled ahead. See `SampledAhead`.

    Args:
        episode: The episode.
        objects: Its objects, which sample.
        threads: Where its requests continue.
        generate: How a reply is sampled.
        inbox: Its requests.
    """

    def __init__(
        self,
        episode: Episode,
        objects: EpisodeObjects,
        threads: AgentThreads,
        generate: GenerateAction,
        inbox: Inbox,
    ) -> None:
        self._episode, self._objects, self._threads = episode, objects, threads
        self._generate, self._inbox = generate, inbox
        self._jobs: dict[Exchange, deque[_Job]] = {}
        self._stopped: set[Exchange] = set()
        """Requests that a limit stops, as far as is known."""
        self._next = 0
        """The turn number of the next reply that is sampled ahead."""
        self._current: Exchange | None = None
        self._asked_at = -1
        """The newest turn when the current request was attached."""

    def begin(self, exchange: Exchange) -> None:
        """Begin to sample the replies to a request, if limits allow it; a second call does nothing."""
        if exchange in self._jobs:
            return
        jobs = self._jobs[exchange] = deque()
        asked, vision = exchange.request, self._generate.vision
        try:
            if vision is not None:  # images are stored when its turn comes
                asked = replace(asked, messages=in_memory(asked.messages, vision))
            conversation = self._threads.conversation_for(self._episode, asked)
        except EngineError:  # its turn reports it
            return
        if not any(self._jobs.values()):
            self._next = 0
        sampling = (
            self._current is not None and self._episode.turn == self._asked_at and not self._jobs.get(self._current)
        )
        self._next = max(self._next, self._episode.turn + 1 + sampling)
        for _ in range(asked.replies):
            request = self._generate.request_ahead(self._episode, conversation, self._next, asked.sampling)
            if request is None:
                self._stopped.add(exchange)
                return
            self._next += 1
            task = asyncio.ensure_future(self._objects.sample(request))
            task.add_done_callback(self._done)
            jobs.append(_Job(request=request, task=task))

    def _done(self, task: asyncio.Task[Generation]) -> None:
        if not task.cancelled():
            task.exception()  # raised again when its turn comes; a reply that is never used fails nothing
        self._inbox.woken.set()

    def has_begun(self, exchange: Exchange) -> bool:
        """Whether a reply to a request is being sampled, or was."""
        return bool(self._jobs.get(exchange))

    def is_ready(self, exchange: Exchange) -> bool:
        """Whether the first reply to a request is there, or its turn must come before it can be sampled."""
        jobs = self._jobs.get(exchange)
        return jobs[0].task.done() if jobs else exchange not in self._stopped

    def answers(self, exchange: Exchange | None) -> None:
        """Note which request the next turns answer; None: none."""
        if self._current is not None and exchange is not self._current:
            for job in self._jobs.pop(self._current, ()):
                job.task.cancel()
        self._current, self._asked_at = exchange, self._episode.turn

    def take(self, request: GenerateRequest) -> Awaitable[Generation] | None:
        """The reply to the current request that was sampled ahead; None if there is none for this prompt."""
        jobs = None if self._current is None else self._jobs.get(self._current)
        if not jobs:
            return None
        job = jobs.popleft()
        if _same(job.request, request):
            return job.task
        job.task.cancel()
        return None

    def close(self) -> None:
        """Give up all replies that are being sampled."""
        for jobs in self._jobs.values():
            for job in jobs:
                job.task.cancel()
        self._jobs.clear()


def _same(one: GenerateRequest, other: GenerateRequest) -> bool:
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and one.images == other.images
        and one.sampling == other.sampling
        and one.max_new_tokens == other.max_new_tokens
        and one.experts_from == other.experts_from
        and one.messages == other.messages
        and one.tools == other.tools
    )
