"""Finds the reply that a request of an agent program continues: the deepest one that its history echoes.

A history echoes a reply if all its messages up to the reply are those of the reply's own conversation, and its last one is the
reply. What SDKs change does not count: missing reasoning, null content, spelling of JSON, keys of other APIs, a stop text
that was added again, white space at the end of a reply. Reasoning that is given must be the reply's own. All else counts.

Pure: the index depends only on the requests and replies that were added, in order. A request costs O(its messages).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from urllib.parse import unquote_to_bytes

from engine.plugins.agents.wire.requests import ModelReply
from engine.schemas.base import Struct
from engine.schemas.message import ImagePart, Message

ROOT = ""
"""The key of the empty history."""


class Continuation(Struct, frozen=True, kw_only=True):
    """Where a request continues."""

    parent: int | None
    """The turn of the reply; None if its history echoes none."""
    covered: int
    """How many of its messages are the history up to that reply."""
    reason: str
    """Why it begins a branch: `edited`, `repeated`, `tools_changed`, `condensed` or `subagent`; empty if it does not."""


class Request(Struct, frozen=True, kw_only=True):
    """A request that was added."""

    key: str
    """The key of its history."""
    opening: str
    """The key of its messages up to the first one of a user."""
    length: int
    """How many messages it has."""
    tools: str


@dataclass(slots=True)
class _Known:
    """A reply that was sent."""

    turn: int
    key: str
    """The key of the history up to and including it."""
    reasoning: str | None
    call_ids: list[str]
    tools: str
    request: Request
    continued: bool = False


@dataclass(slots=True)
class EchoIndex:
    """The requests and replies of one episode.

    Args:
        stop_texts: Texts that end replies and that some programs add again.
    """

    stop_texts: tuple[str, ...] = ()
    _replies: dict[str, list[_Known]] = field(default_factory=dict)
    """By key of the history up to and including the reply."""
    _turns: dict[int, _Known] = field(default_factory=dict)
    _same: dict[str, str] = field(default_factory=dict)
    """By key of a history whose last reply has its stop text again: the key without it."""
    _requests: set[tuple[str, str]] = field(default_factory=set)
    """Keys of requests and of their tools."""
    _openings: dict[str, int] = field(default_factory=dict)
    """By key of the messages up to the first user message: the longest request that began with them."""

    def keys(self, messages: Sequence[Message], before: str = ROOT) -> list[str]:
        """The key of the history up to each message.

        Args:
            messages: The messages.
            before: The key of the history before them.
        """
        found = []
        for message in messages:
            content = json.dumps(self._content(message), sort_keys=True, ensure_ascii=True)
            digest = sha256(f"{before}\0{content}".encode()).hexdigest()
            before = self._same.get(digest, digest)
            found.append(before)
        return found

    def find(self, messages: Sequence[Message], tools: str) -> Continuation:
        """Find where a request continues.

        Args:
            messages: The whole request.
            tools: The key of its tools (`tools_key`).
        """
        keys = self.keys(messages)
        parent, covered = None, 0
        for at, (message, key) in enumerate(zip(messages, keys, strict=True)):
            if message.role != "assistant" or key not in self._replies:
                continue
            fitting = [known for known in self._replies[key] if message.reasoning in (None, "", known.reasoning)]
            if not fitting:
                break  # it has other reasoning than was sampled, so the history from here on is another one
            ids = [call.id for call in message.tool_calls]
            parent, covered = max(fitting, key=lambda known: _nearness(known, ids)), at + 1
        repeated = bool(keys) and (keys[-1], tools) in self._requests
        if parent is None:
            return Continuation(
                parent=None, covered=0, reason="repeated" if repeated else self._unrelated(messages, keys)
            )
        if parent.tools != tools:
            return Continuation(parent=parent.turn, covered=covered, reason="tools_changed")
        if any(message.role == "assistant" for message in messages[covered:]):
            return Continuation(parent=parent.turn, covered=covered, reason="edited")
        if parent.continued:
            return Continuation(parent=parent.turn, covered=covered, reason="repeated" if repeated else "edited")
        return Continuation(parent=parent.turn, covered=covered, reason="")

    def add_request(self, new: Sequence[Message], tools: str, parent: int | None) -> Request:
        """Add a request that is answered now.

        Args:
            new: Its messages after the reply that it continues; all of them if it continues none.
            tools: The key of its tools.
            parent: The turn that it continues.
        """
        known = None if parent is None else self._turns[parent]
        keys = self.keys(new, ROOT if known is None else known.key)
        if known is None:
            request = Request(key=keys[-1], opening=self._opening(new, keys), length=len(new), tools=tools)
        else:
            known.continued = True
            key = keys[-1] if keys else known.key
            request = Request(
                key=key, opening=known.request.opening, length=known.request.length + 1 + len(new), tools=tools
            )
        self._requests.add((request.key, tools))
        self._openings[request.opening] = max(request.length, self._openings.get(request.opening, 0))
        return request

    def add_reply(self, request: Request, turn: int, reply: ModelReply) -> None:
        """Add a reply.

        Args:
            request: The request that it answers.
            turn: Its turn.
            reply: The reply as the program gets it. A history may have the stop text that ended it at its end again.
        """
        sent = reply.message
        [key] = self.keys([sent], request.key)
        if reply.stopped:
            [again] = self.keys([replace(sent, content=sent.text + reply.stopped)], request.key)
            if again != key:
                self._same[again] = key
        ids = [call.id for call in sent.tool_calls]
        known = _Known(turn, key, sent.reasoning, ids, request.tools, request)
        self._turns[turn] = known
        self._replies.setdefault(key, []).append(known)

    def _unrelated(self, messages: Sequence[Message], keys: Sequence[str]) -> str:
        """The reason of a request that echoes no reply."""
        if not self._openings:
            return ""
        longest = self._openings.get(self._opening(messages, keys))
        if longest is None:
            return "subagent"
        return "condensed" if len(messages) < longest else "edited"

    @staticmethod
    def _opening(messages: Sequence[Message], keys: Sequence[str]) -> str:
        first = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
        return keys[first]

    def _content(self, message: Message) -> list[Any]:
        """What counts of a message, as JSON."""
        if message.role != "assistant":
            return [message.role, _said(message), message.tool_call_id]
        text = message.text
        for stop in self.stop_texts:
            text = text.rstrip().removesuffix(stop)
        return ["assistant", text.rstrip(), [[call.name, _plain(call.arguments)] for call in message.tool_calls]]


def _nearness(known: _Known, ids: list[str]) -> tuple[bool, bool, int]:
    """Of replies with one content: the one whose calls have these ids, then one that nothing continues, then the newest."""
    return known.call_ids == ids, not known.continued, known.turn


def tools_key(tools: Sequence[dict[str, Any]]) -> str:
    """The key of a request's tools: equal for equal schemas, however their JSON is spelled."""
    return json.dumps(_plain(list(tools)), sort_keys=True) if tools else ""


def _said(message: Message) -> Any:
    """A content, with digests instead of images; parts without images are one text."""
    if isinstance(message.content, str) or not message.images:
        return message.text
    return [_digest(part.image) if isinstance(part, ImagePart) else part.text for part in message.content]


def _digest(image: str) -> list[str]:
    """The digest of an image that is given by digest or `data:` URI, in a list because a text may look like one."""
    if not image.startswith("data:"):
        return [image]
    head, _, body = image[5:].partition(",")
    try:
        data = b64decode(body) if head.endswith(";base64") else unquote_to_bytes(body)
    except ValueError:
        return [image]
    return ["sha256:" + sha256(data).hexdigest()]


def _plain(value: Any) -> Any:
    """JSON in which equal numbers are spelled alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
