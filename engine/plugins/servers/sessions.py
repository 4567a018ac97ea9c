"""Sessions of SGLang: a server keeps the prompt of an episode, and a request sends what is new alone.

Invariant: a session changes the bytes that are sent and nothing else. A reply in it is accepted only if the server
echoes the new ids and counts the tokens of the whole prompt, and the reply before it was accepted on the same server.
Whatever fails ends the session, and the next try sends the whole prompt, to any server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.errors import BackendError
from engine.plugins.servers.wire import begins_with

if TYPE_CHECKING:
    from engine.plugins.servers.pool import Server
    from engine.plugins.servers.wire import EncodedRequest
    from engine.schemas.generation import GenerateRequest

log = structlog.get_logger(__name__)

LEAST_TOKENS = 8192
"""A shorter prompt is sent whole: that costs less than a session."""
MOST_TOKENS = 8 << 20
"""Tokens of the prompts of one session together: SGLang keeps about 20 bytes for each of them until it ends."""
IDLE_SECONDS = 600.0
"""After so long without a request a server ends a session by itself."""
MOST_FAILED = 8
"""After so many sessions that failed one after the other a server gets no more."""
CLOSE_SECONDS = 2.0
"""Time that the end of a backend waits until the servers have ended its sessions."""


class Session:
    """One session: its server, and the newest reply in it.

    Args:
        server: The server.
        features: See `Sessions`.
    """

    __slots__ = ("features", "following", "id", "is_open", "prompt", "reply", "rid", "server", "tokens")

    def __init__(self, server: Server, features: str) -> None:
        self.server = server
        self.features = features
        """See `Sessions`."""
        self.id = secrets.token_hex(12)
        self.is_open = False
        self.tokens = 0
        """Of the prompts of its requests together."""
        self.following: Session | None = None
        """The session after this one."""
        self.rid = ""
        """Of the newest reply; empty before the first."""
        self.prompt = self.reply = np.empty(0, np.int32)

    def covers(self, ids: np.ndarray) -> int:
        """How many of a prompt's ids, int32 [tokens], the server has: those of the newest reply and its prompt, or
        none."""
        start, end = len(self.prompt), len(self.prompt) + len(self.reply)
        follows = self.rid and len(ids) > end and begins_with(ids, self.prompt)
        return end if follows and np.array_equal(ids[start:end], self.reply) else 0

    def fields(self, covered: int) -> bytes:
        """The fields of a request that follows the newest reply, or begins with a whole prompt."""
        after = b',"rid":"%b"' % self.rid.encode() if covered else b""
        return b',"session_params":{"id":"%b"%b}' % (self.id.encode(), after)


class Sessions:
    """The sessions of one backend, one for each long episode.

    Args:
        features: Names the weights that compute the features of images. A server may keep those of a session's images.
    """

    def __init__(self, features: Callable[[], str] = str) -> None:
        self._features = features
        self._of: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._failed: Counter[Server] = Counter()
        """By server: sessions that failed since the last one that had a reply."""

    def session(self, request: GenerateRequest, server: Server, ids: np.ndarray) -> Session | None:
        """The session in which a request with these ids, int32 [tokens], is sent; None: it is sent in none, and one for
        the next is perhaps opened."""
        if len(ids) < LEAST_TOKENS:
            return None
        episode_id = request.episode_id
        session = self._of.get(episode_id)
        if session is None or session.server is not server or self._is_outdated(session, request):
            self.end(episode_id)
            if self._failed[server] < MOST_FAILED:
                self._of[episode_id] = self._opening(server)
            return None
        if session.tokens > MOST_TOKENS // 2 and session.following is None:
            session.following = self._opening(server)
        if session.tokens > MOST_TOKENS and session.following is not None:
            following, session.following = session.following, None
            self.end(episode_id)
            self._of[episode_id] = session = following
        if not session.is_open:
            return None
        session.tokens += len(ids) // (4 if request.images else 1)  # to send all images again costs more than memory
        return session

    def covers(self, request: GenerateRequest) -> int:
        """How many ids of a request's prompt its session has."""
        session = self._of.get(request.episode_id)
        return 0 if session is None or self._is_outdated(session, request) else session.covers(request.input_ids)

    def _is_outdated(self, session: Session, request: GenerateRequest) -> bool:
        return bool(request.images) and session.features != self._features()

    def replied(self, sent: EncodedRequest, reply: np.ndarray) -> None:
        """A request in a session was answered: int32 [tokens]."""
        assert sent.session is not None
        sent.session.rid, sent.session.prompt, sent.session.reply = sent.rid, sent.ids, reply
        if sent.in_session:
            self._failed.pop(sent.session.server, None)

    def failed(self, episode_id: str) -> None:
        """A request in the session of an episode failed."""
        if (session := self._of.get(episode_id)) is not None:
            self._failed[session.server] += 1
            self.end(episode_id)

    def end(self, episode_id: str) -> None:
        """End the session of an episode, if it has one."""
        session = self._of.pop(episode_id, None)
        while session is not None:
            if session.is_open:
                self._run(self._ask(session, "close_session", {}))
            session = session.following

    async def close(self) -> None:
        """End all sessions. This does not raise."""
        for episode_id in list(self._of):
            self.end(episode_id)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=CLOSE_SECONDS)
        for task in list(self._tasks):
            task.cancel()

    def _opening(self, server: Server) -> Session:
        session = Session(server, self._features())
        self._run(self._ask(session, "open_session", {"capacity_of_str_len": 1 << 30, "timeout": IDLE_SECONDS}))
        return session

    async def _ask(self, session: Session, path: str, settings: dict[str, float]) -> None:
        try:
            await session.server.json("POST", f"/{path}", {"session_id": session.id, **settings})
            session.is_open = path == "open_session"
        except BackendError as error:
            log.debug("a session was not opened or ended", server=session.server.url, reason=str(error))
            self._failed[session.server] += 1

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
