"""The requests of one episode's program: which wait, which are answered, which repeat another, and whose replies nobody
received.

Invariant: every request that was let in gets its replies, or an error when the inbox closes. A reply counts as received
while one connection that asked for it has it, or still waits for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from engine.errors import EngineError
from engine.plugins.agents.rewards import read_posted
from engine.plugins.agents.server import server_of_loop
from engine.plugins.agents.wire.requests import ApiError, ModelReply, ModelRequest, Replies, Session
from engine.rewards.ledger import REWARD
from engine.schemas.reward import RewardEvent

IDEMPOTENCY_KEY, RETRY_COUNT = "idempotency-key", "x-stainless-retry-count"
"""Headers that mark a retry: the first names a request and its retries, the second counts them (SDKs of OpenAI and
Anthropic)."""
_ANSWERED = ModelRequest(messages=[])


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its replies."""

    request: ModelRequest
    """Empty once it is answered."""
    body: str
    """The hash of its path and body."""
    answer: asyncio.Future[Replies]
    replies: list[ModelReply] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    """The turns of its replies so far."""
    readers: int = 0
    """Connections that have its replies, or wait for them."""
    unheard: dict[Exchange, None] = field(default_factory=dict)
    """Where it is noted if nobody received its replies."""

    def leave(self) -> None:
        """Note that one of its connections was closed before it had the whole answer."""
        self.readers -= 1
        if not self.readers:
            self.unheard[self] = None


class Inbox:
    """The requests of one episode.

    Args:
        session: What its requests are read with.
        episode: The episode's id.
        reward_names: Names that rewards may have.
    """

    def __init__(self, session: Session, episode: str = "", reward_names: Collection[str] = (REWARD,)) -> None:
        self._episode, self._names = episode, reward_names
        self._sent: dict[str, list[int]] = {}
        """The turns of each reply that was sent, by `Replies.id`."""
        self._rewards: list[RewardEvent] = []
        """Rewards that are in no record yet."""
        self.session = session
        """What its requests are read with."""
        self.key = secrets.token_urlsafe(24)
        """The key of the episode: a request with it belongs here, until `close`."""
        self.waiting: deque[Exchange] = deque()
        """Requests without a reply, in the order in which they came."""
        self.refused = ""
        """Why the newest request that was refused was refused."""
        self.woken = asyncio.Event()
        """Set when a request comes."""
        self.on_request: Callable[[Exchange], None] | None = None
        """Called with each request that waits."""
        self.counter: Callable[[ModelRequest], int] | None = None
        """Counts the tokens of the prompt that a request leads to, while the episode runs."""
        self._known: dict[str, Exchange] = {}
        """By hash of path and body, and by idempotency key: the newest request, for retries."""
        self._unheard: dict[Exchange, None] = {}
        """Requests whose connections were closed before they had the whole answer."""
        self.over: ApiError | None = None
        """The answer to requests after `close`; None before."""

    def ask(self, request: ModelRequest, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """Let a request in, or find the one that it repeats: its future answer raises `ApiError`.

        The caller calls `leave` if its connection is closed before the last byte of the answer.

        Raises:
            ApiError: The episode is over, or another request had the same idempotency key.
        """
        if self.over is not None:
            raise self.over
        name = sha256(path.encode() + b"\0" + body).hexdigest()
        retry_key = headers.get(IDEMPOTENCY_KEY, "")
        exchange = self._known.get(f"key {retry_key}") if retry_key else None
        if exchange is not None and exchange.body != name:
            raise ApiError(f"another request had the {IDEMPOTENCY_KEY} {retry_key!r}", code="idempotency_key_reused")
        if exchange is None and headers.get(RETRY_COUNT, "0") != "0":
            exchange = self._known.get(name)
        if exchange is None:
            exchange = Exchange(request, name, asyncio.get_running_loop().create_future(), unheard=self._unheard)
            exchange.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._known[name] = exchange
            if retry_key:
                self._known[f"key {retry_key}"] = exchange
            self.waiting.append(exchange)
            if self.on_request is not None:
                self.on_request(exchange)
            self.woken.set()
        exchange.readers += 1
        self._unheard.pop(exchange, None)
        return exchange

    def count(self, request: ModelRequest) -> int:
        """Count the tokens of the prompt that a request leads to; it is not answered.

        Raises:
            ApiError: The episode is over, or the model cannot be shown the request.
        """
        if self.over is not None or self.counter is None:
            raise self.over or ApiError("tokens cannot be counted now", code="episode_over")
        try:
            return self.counter(request)
        except EngineError as error:
            raise ApiError(str(error), param="messages") from error

    def reward(self, body: Any) -> dict[str, Any]:
        """Take a reward for a reply that was sent, and return what is written with the next record; see `read_posted`.

        Raises:
            ApiError: It cannot be written; status 409 if the episode is over.
        """
        if self.over is not None:
            raise ApiError(self.over.message, status=409, code="episode_over")
        event = read_posted(body, self._names, self._sent, self._episode)
        self._rewards.append(event)
        return {"turn": event.turn, "name": event.name, "value": event.value}

    def take_rewards(self) -> list[RewardEvent]:
        """The rewards since the last call."""
        taken, self._rewards = self._rewards, []
        return taken

    def send(self, exchange: Exchange, replies: Replies) -> None:
        """Answer a request."""
        self._sent[replies.id] = exchange.turns
        exchange.request = _ANSWERED  # a long history in each of many requests would fill the memory
        if not exchange.answer.done():
            exchange.answer.set_result(replies)

    @property
    def unreceived(self) -> list[int]:
        """The turns whose replies nobody received, as far as is known now, in order."""
        return sorted(turn for exchange in self._unheard for turn in exchange.turns)

    async def close(self, why: ApiError, *others: Exchange) -> None:
        """Refuse the key, and answer the requests that wait (in `waiting`, and `others`) with an error, once."""
        if self.over is not None:
            return
        self.over = why
        open_ = [exchange for exchange in (*others, *self.waiting) if not exchange.answer.done()]
        for exchange in open_:
            exchange.answer.set_exception(why)
        self.waiting.clear()
        if open_:
            await asyncio.sleep(0.05)  # the connections write the errors before the program dies
        await server_of_loop().close(self.key)
