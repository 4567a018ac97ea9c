"""A real endpoint that answers every request with one reply: for tests of the model APIs with their own packages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from engine.plugins.agents.inbox import Exchange
from engine.plugins.agents.server import server_of_loop
from engine.plugins.agents.threads import AgentThreads, Continuation, tools_key
from engine.plugins.agents.wire.requests import ApiError, ModelApi, ModelReply, ModelRequest, Replies, Session
from engine.schemas.message import Message, ToolCall

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel, in base64."""
URI = f"data:image/png;base64,{PNG}"
REPLY = Message(
    role="assistant",
    content="Ä\n",
    reasoning="hm",
    tool_calls=[ToolCall(id=f"call_0_{at}", name="f", arguments={"x": "é\n", "n": at}) for at in range(2)],
)


class Answers:
    """Answers every request with the same reply, or an error; keeps the requests."""

    def __init__(self) -> None:
        self.session = Session()
        self.refused = ""
        self.asked: list[ModelRequest] = []
        self.reply = ModelReply(message=REPLY, finish="tool_calls", prompt_tokens=5, reply_tokens=3)
        self.fault: ApiError | None = None
        self.wait = 0.0

    def ask(self, request: ModelRequest, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        self.asked.append(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Replies] = loop.create_future()
        if self.fault is not None:
            loop.call_later(self.wait, answer.set_exception, self.fault)
        else:
            made = Replies(id=str(len(self.asked)), created=7, replies=[self.reply] * request.replies)
            loop.call_later(self.wait, answer.set_result, made)
        return Exchange(request, "", answer, readers=1)

    def reward(self, body: Any) -> dict[str, Any]:
        return {}

    def count(self, request: ModelRequest) -> int:
        return 100 + len(request.messages)


@asynccontextmanager
async def endpoint() -> AsyncIterator[tuple[str, Answers]]:
    """The address of an endpoint whose key is `key`, and its answers."""
    answers = Answers()
    address = await server_of_loop().open("key", answers)
    try:
        yield address, answers
    finally:
        await server_of_loop().close("key")


# --- histories --------------------------------------------------------------------------------------------

_TEXTS = st.text("ab \né{", max_size=4)
_VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0]) | st.text('a"\n', max_size=2)


@st.composite
def replies(draw: st.DrawFn, turn: int) -> ModelReply:
    """A reply of the model, as programs get it."""
    calls = [
        ToolCall(
            id=f"call_{turn}_{at}",
            name=draw(st.sampled_from(["f", "g"])),
            arguments=draw(
                st.dictionaries(st.text("xy", max_size=2), _VALUES | st.lists(_VALUES, max_size=2), max_size=2)
            ),
        )
        for at in range(draw(st.integers(0, 3)))
    ]
    reasoning = draw(st.none() | _TEXTS.filter(bool))
    message = Message(role="assistant", content=draw(_TEXTS), reasoning=reasoning, tool_calls=calls)
    finish = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    return ModelReply(message=message, finish=finish, prompt_tokens=9, reply_tokens=4)


class Talk:
    """One conversation over an API, and the index of its replies.

    Args:
        api: The API.
        session: What its requests are read with.
    """

    def __init__(self, api: ModelApi, session: Session | None = None) -> None:
        self.api, self.session = api, session or Session()
        self.index = AgentThreads()
        self.places: list[Continuation] = []
        """Where each request continued."""

    def ask(self, body: dict[str, object], reply: ModelReply) -> tuple[ModelRequest, Replies]:
        """Answer a request as the engine does."""
        request = self.api.read({"model": "policy", **body}, self.session)
        tools = tools_key(request.tools)
        place = self.index.find(request.messages, tools)
        self.places.append(place)
        known = self.index.add_request(request.messages[place.covered :], tools, place.parent)
        self.index.add_reply(known, len(self.places) - 1, reply)
        return request, Replies(id=f"a/0-{len(self.places) - 1}", created=7, replies=[reply])

    def check_one_tape(self) -> None:
        """Each request continued the reply before it."""
        assert self.places == [
            Continuation(parent=None, covered=0, reason=""),
            *(
                Continuation(parent=turn, covered=self.places[turn + 1].covered, reason="")
                for turn in range(len(self.places) - 1)
            ),
        ]


def without_reasoning(reply: ModelReply) -> ModelReply:
    return replace(reply, message=replace(reply.message, reasoning=None))
