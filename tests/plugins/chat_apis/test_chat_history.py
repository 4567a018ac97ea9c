"""Calls and results in pairs, as chat APIs require them."""

from __future__ import annotations

from itertools import product

from engine.plugins.chat_apis.backend import NO_RESULT, paired
from engine.schemas.message import Message, ToolCall


def asks(*ids: str) -> Message:
    return Message(role="assistant", content="a", tool_calls=[ToolCall(id=i, name="f", arguments={}) for i in ids])


def result(id_: str) -> Message:
    return Message(role="tool", content=f"r{id_}", tool_call_id=id_, name="f")


USER, PLAIN = Message(role="user", content="u"), Message(role="assistant", content="p")


def test_a_conversation_in_pairs_is_sent_as_it_is() -> None:
    said = [USER, asks("1", "2"), result("1"), result("2"), PLAIN]
    assert paired(said) == said


def test_a_call_without_result_gets_one_that_points_to_what_follows() -> None:
    missing = Message(role="tool", content=NO_RESULT, tool_call_id="2", name="f")
    assert paired([asks("1", "2"), result("1"), USER]) == [asks("1", "2"), result("1"), missing, USER]


def test_the_answer_to_a_malformed_call_is_a_message_of_the_user() -> None:
    said = paired([PLAIN, result("1"), asks("2"), result("3"), result("2")])
    assert said == [
        PLAIN,
        Message(role="user", content="r1"),
        asks("2"),
        result("2"),
        Message(role="user", content="r3"),
    ]


def test_every_sequence_comes_out_in_pairs_with_all_its_texts() -> None:
    for said in product([USER, PLAIN, asks("1"), asks("1", "2"), result("1"), result("2")], repeat=4):
        sent, waiting = paired(said), list[str | None]()
        for message in sent:
            if message.role == "tool":
                assert message.tool_call_id == waiting.pop(0)
            else:
                assert not waiting
                waiting = [call.id for call in message.tool_calls]
        assert not waiting
        texts = [message.content for message in sent]
        assert all(texts.count(message.content) >= said.count(message) for message in said)
