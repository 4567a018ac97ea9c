"""The threads of one agent program: its requests and replies, and where in the episode's conversation each continues.

Invariant: it depends only on the episode's records, so a replay rebuilds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import SpecCodeError
from engine.plugins.agents.echo import Continuation, EchoIndex, Request, tools_key
from engine.plugins.agents.record import AgentRecord
from engine.plugins.agents.wire.requests import ModelReply, SampledToken
from engine.schemas.message import MalformedCall

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.plugins.agents.inbox import Exchange
    from engine.plugins.agents.wire.requests import ModelRequest
    from engine.tokens.conversation import Conversation, ConversationMark


class AgentThreads:
    """The threads of one episode: a part of it, which `of` finds."""

    __slots__ = ("_index", "_marks", "_request")

    def __init__(self) -> None:
        self._index = EchoIndex()
        self._marks: dict[int, ConversationMark] = {}
        """By turn: the conversation directly after its reply."""
        self._request: Request | None = None
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
        threads._index.stop_texts = stop_texts
        return threads

    def find(self, request: ModelRequest) -> Continuation:
        """Find where a request continues."""
        return self._index.find(request.messages, tools_key(request.tools))

    def is_recorded(self, record: AgentRecord, exchange: Exchange) -> bool:
        """Whether a request is the one of a record."""
        asked = exchange.request
        place = self.find(asked)
        new = asked.messages[place.covered :]
        return (
            record.event == "request"
            and place.parent == record.parent
            and tools_key(asked.tools) == tools_key(record.tools)
            and self._index.keys(new) == self._index.keys(record.messages)
        )

    def conversation_for(self, episode: Episode, request: ModelRequest) -> Conversation:
        """A conversation with the prompt that a request leads to, if it is attached.

        Raises:
            RenderError: The model cannot be shown it.
        """
        place = self.find(request)
        mark = None if place.parent is None else self._marks[place.parent]
        return episode.conversation.after(mark, request.messages[place.covered :], request.tools)

    def note_reply(self, episode: Episode) -> None:
        """Add the newest reply, if it is not known yet. A second call changes nothing."""
        if self._request is None or episode.turn < 0 or episode.turn in self._marks:
            return
        self._marks[episode.turn] = episode.conversation.mark()
        self._index.add_reply(self._request, episode.turn, newest_reply(episode))

    def attach(self, episode: Episode, record: AgentRecord) -> None:
        """Make a request the episode's next prompt.

        Raises:
            RenderError: The model cannot be shown it.
        """
        mark = None if record.parent is None else self._marks[record.parent]
        episode.conversation.resume_at(
            mark, record.messages, tools=record.tools, reason=record.reason, again=record.sample > 0
        )
        self._request = self._index.add_request(record.messages, tools_key(record.tools), record.parent)


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
    return ModelReply(
        message=message,
        finish="length" if cut else "tool_calls" if message.tool_calls else "stop",
        prompt_tokens=turn.prompt_tokens,
        reply_tokens=turn.reply_tokens or turn.end - turn.start,
        stopped=stopped,
        sampled=_sampled(episode.conversation) if logprobs else (),
    )


def _sampled(conversation: Conversation) -> list[SampledToken]:
    """The tokens of the newest turn, with the log-probs of its row."""
    place = conversation.turns[-1]
    tape = conversation.tapes[place.branch]
    ids, logprobs = tape.ids[place.start : place.end], tape.newest_logprobs(place.end - place.start)
    data_of = conversation.template.fast.data_of
    return [
        SampledToken(data=data_of(id_), logprob=logprob)
        for id_, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
