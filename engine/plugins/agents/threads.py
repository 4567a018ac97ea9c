"""The threads of one agent program: its requests and replies, and where in the episode's conversation each continues.

Invariant: it depends only on the episode's records, so a replay rebuilds it.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from engine.actions.record_filters import in_memory
from engine.errors import SpecCodeError
from engine.plugins.agents.record import AgentRecord
from engine.plugins.agents.wire.requests import ModelReply, SampledToken
from engine.schemas.base import Struct
from engine.schemas.message import ImagePart, MalformedCall, Message

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.plugins.agents.inbox import Exchange
    from engine.plugins.agents.wire.requests import ModelRequest
    from engine.tokens.conversation import Conversation, ConversationMark
    from engine.tokens.vision import Vision

ROOT = ""
"""The key of the empty history."""


class Continuation(Struct, frozen=True, kw_only=True):
    """Where a request continues."""

    parent: int | None
    """The turn of the reply; None if its history echoes none."""
    covered: int
    """How many of its messages are the history up to that reply."""
    reason: str
    """Why it begins a branch: `edited`, `repeated`, `tools_changed`, `condensed` or `subagent`; empty if it does
    not."""


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
class AgentThreads:
    """The requests and replies of one episode, a part of it that `of` finds. It finds the reply that a request
    continues, the deepest one that its history echoes.

    A history echoes a reply if all its messages up to the reply are those of the reply's own conversation, and its last
    one is the reply. What SDKs change does not count: missing reasoning, null content, spelling of JSON, keys of other
    APIs, a stop text that was added again, white space at the end of a reply. Reasoning that is given must be the
    reply's own. All else counts. A request costs O(its messages).

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
    _marks: dict[int, ConversationMark] = field(default_factory=dict)
    """By turn: the conversation directly after its reply."""
    _newest: Request | None = None
    """The newest request."""

    @classmethod
    def of(cls, episode: Episode, stop_texts: tuple[str, ...]) -> AgentThreads:
        """The threads of an episode.

        Args:
            episode: The episode.
            stop_texts: The texts of the tokens that end a reply.

        Raises:
            SpecCodeError: No state has reset the episode.
        """
        if episode.opening is None:
            raise SpecCodeError(
                "`run_agent` needs a state with `action: reset` before it", blame="spec", kind="agent_before_reset"
            )
        threads = episode.part(cls)
        threads.stop_texts = stop_texts
        return threads

    def keys(self, messages: Sequence[Message], before: str = ROOT) -> list[str]:
        """The key of the history up to each message.

        Args:
            messages: The messages.
            before: The key of the history before them.
        """
        keys = []
        for message in messages:
            counted: list[Any] = [message.role]
            if message.role == "assistant":
                text = message.text
                for stop in self.stop_texts:
                    text = text.rstrip().removesuffix(stop)
                counted += [text.rstrip(), [[call.name, _plain(call.arguments)] for call in message.tool_calls]]
            else:
                counted += [_said(message), message.tool_call_id]
            content = json.dumps(counted, sort_keys=True, ensure_ascii=True)
            digest = sha256(f"{before}\0{content}".encode()).hexdigest()
            before = self._same.get(digest, digest)
            keys.append(before)
        return keys

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
            fitting = [reply for reply in self._replies[key] if message.reasoning in (None, "", reply.reasoning)]
            if not fitting:
                break  # it has other reasoning than was sampled, so the history from here on is another one
            ids = [call.id for call in message.tool_calls]
            # of replies with one content: the one whose calls have these ids, then one that nothing continues, then the
            # newest
            parent = max(fitting, key=lambda reply: (reply.call_ids == ids, not reply.continued, reply.turn))
            covered = at + 1
        repeated = bool(keys) and (keys[-1], tools) in self._requests
        if parent is None:
            reason = "repeated" if repeated else ""
            if self._openings and not repeated:
                longest = self._openings.get(self._opening(messages, keys))
                reason = "subagent" if longest is None else "condensed" if len(messages) < longest else "edited"
            return Continuation(parent=None, covered=0, reason=reason)
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
        continued = None if parent is None else self._turns[parent]
        keys = self.keys(new, ROOT if continued is None else continued.key)
        if continued is None:
            request = Request(key=keys[-1], opening=self._opening(new, keys), length=len(new), tools=tools)
        else:
            continued.continued = True
            key = keys[-1] if keys else continued.key
            request = Request(
                key=key, opening=continued.request.opening, length=continued.request.length + 1 + len(new), tools=tools
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
        added = _Known(turn, key, sent.reasoning, ids, request.tools, request)
        self._turns[turn] = added
        self._replies.setdefault(key, []).append(added)

    @staticmethod
    def _opening(messages: Sequence[Message], keys: Sequence[str]) -> str:
        first = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
        return keys[first]

    # --- the episode --------------------------------------------------------------------------------------

    def is_recorded(self, record: AgentRecord, exchange: Exchange) -> bool:
        """Whether a request is the one of a record."""
        asked = exchange.request
        place = self.find(asked.messages, tools_key(asked.tools))
        new = asked.messages[place.covered :]
        return (
            record.event == "request"
            and place.parent == record.parent
            and tools_key(asked.tools) == tools_key(record.tools)
            and self.keys(new) == self.keys(record.messages)
        )

    def conversation_for(self, episode: Episode, request: ModelRequest, vision: Vision | None) -> Conversation:
        """A conversation with the prompt that a request leads to, if it is attached. Its images are stored only then.

        Raises:
            RenderError: The model cannot be shown it.
            ImageError: An image cannot be read.
        """
        if vision is not None:
            request = replace(request, messages=in_memory(request.messages, vision))
        place = self.find(request.messages, tools_key(request.tools))
        mark = None if place.parent is None else self._marks[place.parent]
        return episode.conversation.after(mark, request.messages[place.covered :], request.tools)

    def note_reply(self, episode: Episode) -> None:
        """Add the newest reply, if it is not known yet. A second call changes nothing."""
        if self._newest is None or episode.turn < 0 or episode.turn in self._marks:
            return
        self._marks[episode.turn] = episode.conversation.mark()
        self.add_reply(self._newest, episode.turn, newest_reply(episode))

    def attach(self, episode: Episode, record: AgentRecord) -> None:
        """Make a request the episode's next prompt.

        Raises:
            RenderError: The model cannot be shown it.
        """
        mark = None if record.parent is None else self._marks[record.parent]
        episode.conversation.resume_at(
            mark, record.messages, tools=record.tools, reason=record.reason, again=record.sample > 0
        )
        self._newest = self.add_request(record.messages, tools_key(record.tools), record.parent)


def tools_key(tools: Sequence[dict[str, Any]]) -> str:
    """The key of a request's tools: equal for equal schemas, however their JSON is spelled."""
    return json.dumps(_plain(list(tools)), sort_keys=True) if tools else ""


def _said(message: Message) -> Any:
    """A content, with digests instead of images, each in a list because a text may look like one; parts without images
    are one text."""
    if isinstance(message.content, str) or not message.images:
        return message.text
    said: list[Any] = []
    for part in message.content:
        if not isinstance(part, ImagePart):
            said.append(part.text)
            continue
        digest = part.image
        if digest.startswith("data:"):
            head, _, body = digest[5:].partition(",")
            with suppress(ValueError):
                data = b64decode(body) if head.endswith(";base64") else unquote_to_bytes(body)
                digest = "sha256:" + sha256(data).hexdigest()
        said.append([digest])
    return said


def _plain(value: Any) -> Any:
    """JSON in which equal numbers are spelled alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def newest_reply(episode: Episode, *, logprobs: bool = False) -> ModelReply:
    """The newest turn as the program gets it: a call that could not be parsed is part of the text.

    Args:
        episode: The episode.
        logprobs: Whether the program asks for the log-probs of the sampled tokens.
    """
    said = next(message for message in reversed(episode.conversation.thread.messages) if message.role == "assistant")
    raw = [attempt.raw for attempt in episode.reply.attempts if isinstance(attempt, MalformedCall)]
    text = "\n".join([*([said.text] if said.text else []), *raw])
    matched = episode.reply.matched
    stopped = matched if isinstance(matched, str) and text.rstrip().endswith(matched) else None
    if stopped is not None:
        text = text.rstrip().removesuffix(stopped)
    message = replace(said, content=text, signed=None)
    cut = episode.reply.finish == "length"
    turn = episode.turns[-1]
    sampled: list[SampledToken] = []
    if logprobs:  # those of the row
        conversation, place = episode.conversation, episode.conversation.turns[-1]
        tape = conversation.tapes[place.branch]
        ids, values = tape.ids[place.start : place.end], tape.newest_logprobs(place.end - place.start)
        data_of = conversation.template.fast.data_of
        sampled = [
            SampledToken(data=data_of(id_), logprob=value)
            for id_, value in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    return ModelReply(
        message=message,
        finish="length" if cut else "tool_calls" if message.tool_calls else "stop",
        prompt_tokens=turn.prompt_tokens,
        reply_tokens=turn.reply_tokens or turn.end - turn.start,
        stopped=stopped,
        sampled=sampled,
    )
