"""A request continues the deepest reply that its history echoes; what SDKs change does not count, all else does."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plugins.agents.threads import AgentThreads, Continuation
from engine.plugins.agents.wire.requests import ModelReply
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall


def said(message: Message, stopped: str | None = None) -> ModelReply:
    return ModelReply(message=message, finish="stop", prompt_tokens=1, reply_tokens=1, stopped=stopped)


TEXTS = st.text("ab \n", max_size=3)
ARGUMENTS = st.dictionaries(st.text("xy", max_size=2), st.integers(-2, 2) | st.text("ab", max_size=2), max_size=2)


@st.composite
def replies(draw: Any, turn: int = 0) -> Message:
    calls = [
        ToolCall(id=f"call_{turn}_{at}", name=draw(st.sampled_from(["f", "g"])), arguments=draw(ARGUMENTS))
        for at in range(draw(st.integers(0, 2)))
    ]
    return Message(role="assistant", content=draw(TEXTS), reasoning=draw(st.none() | TEXTS), tool_calls=calls)


@st.composite
def episodes(draw: Any) -> tuple[AgentThreads, dict[int, list[Message]]]:
    """An index after a few turns of several threads, and by turn its whole conversation."""
    index = AgentThreads(("<|im_end|>",))
    paths: dict[int, list[Message]] = {}
    for turn in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.sampled_from(sorted(paths))) if paths else None
        new = [Message(role="user", content=draw(TEXTS)) for _ in range(draw(st.integers(1, 2)))]
        request = index.add_request(new, "", parent)
        reply = draw(replies(turn))
        index.add_reply(request, turn, said(reply))
        paths[turn] = [*(paths[parent] if parent is not None else []), *new, reply]
    return index, paths


def changed(message: Message, drop: bool, end: str) -> Message:
    """A message as an SDK may send it back."""
    if message.role != "assistant":
        return replace(message, content=[TextPart(text=message.text)])
    calls = [
        replace(
            call,
            arguments={
                key: float(value) if isinstance(value, int) else value
                for key, value in reversed(list(call.arguments.items()))
            },
        )
        for call in message.tool_calls
    ]
    content = message.text.rstrip() + end
    return replace(message, content=content, tool_calls=calls, reasoning=None if drop else message.reasoning)


@given(episodes(), st.booleans(), st.sampled_from(["", "<|im_end|>", "<|im_end|>\n", "  "]), st.data())
def test_a_reply_is_found_whatever_an_sdk_changed(episode: Any, drop: bool, end: str, data: Any) -> None:
    index, paths = episode
    turn = data.draw(st.sampled_from(sorted(paths)))
    history = [changed(message, drop, end) for message in paths[turn]]
    found = index.find([*history, Message(role="user", content="next")], "")
    assert found.parent is not None
    assert found.covered == len(history)
    same = [index.keys(paths[other])[-1] for other in (found.parent, turn)]
    assert same[0] == same[1]  # it, or another turn with an equal conversation
    if not drop and paths[found.parent] != paths[turn]:
        assert paths[found.parent][-1].reasoning == paths[turn][-1].reasoning


@given(episodes(), st.data())
def test_an_edited_message_is_no_echo(episode: Any, data: Any) -> None:
    index, paths = episode
    turn = data.draw(st.sampled_from(sorted(paths)))
    history = list(paths[turn])
    at = data.draw(st.integers(0, len(history) - 1))
    history[at] = replace(history[at], content=history[at].text + "!")
    found = index.find([*history, Message(role="user", content="next")], "")
    assert found.covered <= at
    assert found.reason != ""


def told(index: AgentThreads, *messages: Message, tools: str = "") -> Continuation:
    return index.find(list(messages), tools)


SYSTEM, ASK = Message(role="system", content="S"), Message(role="user", content="Q")
ONE = Message(role="assistant", content="one", reasoning="hm", tool_calls=[])


def started() -> AgentThreads:
    index = AgentThreads()
    assert told(index, SYSTEM, ASK) == Continuation(parent=None, covered=0, reason="")
    index.add_reply(index.add_request([SYSTEM, ASK], "", None), 0, said(ONE))
    return index


def test_each_reason() -> None:
    index = started()
    assert told(index, SYSTEM, ASK, ONE, ASK) == Continuation(parent=0, covered=3, reason="")
    assert told(index, SYSTEM, ASK) == Continuation(parent=None, covered=0, reason="repeated")
    assert told(index, SYSTEM, ASK, ONE, ASK, tools="t") == Continuation(parent=0, covered=3, reason="tools_changed")
    assert told(index, SYSTEM, ASK, ONE, ASK, ONE, ASK) == Continuation(parent=0, covered=3, reason="edited")
    assert told(index, ASK) == Continuation(parent=None, covered=0, reason="subagent")
    request = index.add_request([ASK], "", 0)
    index.add_reply(request, 1, said(replace(ONE, content="two")))
    assert told(index, SYSTEM, ASK, ONE, ASK) == Continuation(parent=0, covered=3, reason="repeated")
    assert told(index, SYSTEM, ASK, ONE, SYSTEM) == Continuation(parent=0, covered=3, reason="edited")
    assert told(index, SYSTEM, ASK, SYSTEM) == Continuation(parent=None, covered=0, reason="condensed")


def test_reasoning_that_is_given_must_be_the_replys() -> None:
    index = started()
    assert told(index, SYSTEM, ASK, replace(ONE, reasoning=None), ASK).parent == 0
    assert told(index, SYSTEM, ASK, replace(ONE, reasoning="other"), ASK).parent is None


def test_of_equal_replies_the_one_with_the_ids_of_the_calls() -> None:
    index = AgentThreads()
    calls = [
        replace(ONE, tool_calls=[ToolCall(id=f"call_{turn}_0", name="f", arguments={"x": 1})]) for turn in range(2)
    ]
    for turn, call in enumerate(calls):
        index.add_reply(index.add_request([ASK], "", None), turn, said(call))
    assert [told(index, ASK, call, ASK).parent for call in calls] == [0, 1]


def test_an_image_is_its_bytes_by_uri_or_digest() -> None:
    data = b"picture"
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    shown, kept = (
        Message(role="user", content=[TextPart(text="See"), ImagePart(image=image)])
        for image in (uri, "sha256:" + hashlib.sha256(data).hexdigest())
    )
    index = AgentThreads()
    index.add_reply(index.add_request([kept], "", None), 0, said(ONE))
    assert told(index, shown, ONE, ASK).parent == 0
    other = replace(shown, content=[TextPart(text="See"), ImagePart(image=uri[:-4] + "AAAA")])
    assert told(index, other, ONE, ASK).parent is None


@pytest.mark.parametrize("end", ["", "STOP", "STOP\n", "STOP "])
def test_a_stop_text_of_the_request_may_be_added_again(end: str) -> None:
    index = AgentThreads()
    index.add_reply(index.add_request([ASK], "", None), 0, said(ONE, "STOP"))
    index.add_reply(index.add_request([ASK], "", 0), 1, said(replace(ONE, content="two")))
    history = [ASK, replace(ONE, content="one" + end), ASK, replace(ONE, content="two")]
    assert told(index, *history, ASK) == Continuation(parent=1, covered=4, reason="")
