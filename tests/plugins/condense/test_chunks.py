"""Chunks are disjoint, within their size, and putting a chunk's own text in its place changes nothing, in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plugins.condense.chunks import block_text, chunks_of, history_of, keywords, replaced
from engine.plugins.condense.spec import CondenseSpec, KeywordsSpec
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

pytest.importorskip("semantic_text_splitter")

WORDS = [
    "word ",
    "埃菲尔铁塔高330米。",
    "ünïcode ",
    "\n\n",
    "[3] ",
    "<block_1>\nold\n</block_1>",
    "東京は日本の首都です。",
    "😀",
    ". ",
    "x" * 60,
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
IMAGE = ImagePart(image="sha256:00")
MESSAGES = st.one_of(
    TEXTS.map(lambda text: Message(role="tool", content=text, tool_call_id="a")),
    st.tuples(TEXTS, TEXTS).map(
        lambda both: Message(role="user", content=[TextPart(text=both[0]), IMAGE, TextPart(text=both[1])])
    ),
    TEXTS.map(lambda text: Message(role="assistant", content=text)),
)
CUTS: list[dict[str, Any]] = [
    {"by": "message"},
    {"by": "tokens", "size": 12},
    {"by": "passage", "pattern": r"\[\d+\] "},
]


@pytest.fixture(scope="module")
def form(tiny_tokenizer_dir: Path) -> ChatTemplate:
    return load_format(ModelSpec(path=str(tiny_tokenizer_dir)), Path())


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(thread=st.lists(MESSAGES, max_size=4), cut=st.sampled_from(CUTS), keep_last=st.integers(0, 2))
def test_chunks_are_parts_of_the_messages_that_may_be_condensed(
    form: ChatTemplate, thread: list[Message], cut: dict[str, Any], keep_last: int
) -> None:
    def count(text: str) -> int:
        return len(form.encode(text))

    spec = CondenseSpec.model_validate(
        {"chunks": cut, "keep_last": keep_last, "opening": True, "condenser": {"kind": "keywords"}}
    )
    found = chunks_of(spec, thread, 0, count)
    assert found == sorted(found, key=lambda chunk: (chunk.place, chunk.part, chunk.start))
    for at, chunk in enumerate(found):
        message = thread[chunk.place]
        assert message.role != "assistant"
        assert chunk.place < len(thread) - keep_last
        assert chunk.tokens == count(chunk.text)
        assert "<block_1>\nold" not in chunk.text
        if cut["by"] == "tokens":
            assert chunk.tokens <= 12 or len(chunk.text) == 1
        for other in found[at + 1 :]:
            same = (other.place, other.part) == (chunk.place, chunk.part)
            assert not same or other.start >= chunk.end
    for place in {chunk.place for chunk in found}:
        own = [(chunk, chunk.text) for chunk in found if chunk.place == place]
        assert replaced(thread[place], own) == thread[place]
        marked = replaced(thread[place], [(chunk, "#") for chunk, _ in own])
        assert marked.images == thread[place].images
        assert marked.text.count("#") == len(own)


def test_a_message_that_is_dropped_loses_its_images(form: ChatTemplate) -> None:
    spec = CondenseSpec(keep_last=0, opening=True)
    message = Message(role="user", content=[TextPart(text="See: "), IMAGE])
    (chunk,) = chunks_of(spec, [message], 0, len)
    shown = replaced(message, [(chunk, block_text(1, "[left out]"))])
    assert shown == Message(role="user", content="<block_1>\n[left out]\n</block_1>")


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "The Eiffel Tower was built by Gustave Eiffel in Paris in 1889 for the World Fair.", "Eiffel Tower"),
        ("zh", "埃菲尔铁塔是1889年由古斯塔夫·埃菲尔在巴黎为世界博览会建造的。", "埃菲尔铁塔"),
        ("ja", "東京タワーは1958年に内藤多仲によって設計され、東京に建てられた。", "東京タワ"),
    ],
)
def test_keywords_are_texts_of_the_chunk_within_the_budget(
    form: ChatTemplate, language: str, text: str, expected: str
) -> None:
    pytest.importorskip("yake")

    def count(words: str) -> int:
        return len(form.encode(words))

    spec = KeywordsSpec(kind="keywords", language=language, tokens=40)
    found = keywords(text, spec, count).split("; ")
    assert any(expected in keyword for keyword in found), found
    assert all(keyword in text for keyword in found)
    assert count("; ".join(found)) <= 40
    assert [text.find(keyword) for keyword in found] == sorted(text.find(keyword) for keyword in found)


@pytest.mark.parametrize(("language", "text"), [("en", ""), ("en", "1 2 3 …"), ("zh", "。。。"), ("en", "😀😀")])
def test_a_text_without_words_has_no_keywords(form: ChatTemplate, language: str, text: str) -> None:
    pytest.importorskip("yake")
    assert keywords(text, KeywordsSpec(kind="keywords", language=language), len) == ""


def test_the_history_ends_before_a_call_whose_results_are_kept() -> None:
    call = ToolCall(id="a", name="f", arguments={})
    thread = [
        Message(role="user", content="Q"),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="1", tool_call_id="a"),
        Message(role="assistant", tool_calls=[call, call]),
        Message(role="tool", content="2", tool_call_id="a"),
        Message(role="tool", content="3", tool_call_id="a"),
    ]
    assert history_of(thread, 1, 0) == (1, 6)
    assert history_of(thread, 1, 1) == (1, 3)
    assert history_of(thread, 1, 3) == (1, 3)
    assert history_of(thread, 1, 4) == (1, 1)
    assert history_of(thread, 1, 9) == (1, 1)
