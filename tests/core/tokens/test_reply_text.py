"""What a template writes for a reply without being rendered is what it writes rendered, or the reply is rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_kit import make_tokenizer
from exactness import cases, load_case
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but

from engine.errors import RenderError
from engine.tokens.bridge.check import ReplyFrame, check_bridge, make_reply_text
from engine.tokens.bridge.kinds import ASSISTANT, BLANK, CALLS, REASONS, TOOL, USER, View
from engine.tokens.bridge.wrapper import parts_of, shape_of
from engine.tokens.jinja_template import JinjaSource
from engine.tokens.template import ChatTemplate

Load = Callable[[str], ChatTemplate]

PIECES = ["Yes.", " ", "\n", "\n\n", "42", "é🙂", "e\u0301", '"', "'", "\\", "{{ x }}", "[x]", "\t", "<b>", "<think>", "</think>", "<|im_end|>", "\ufdd0"]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
JSON = st.recursive(
    TEXT
    | st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALL = st.tuples(
    st.sampled_from(["f", "look_up"]), st.dictionaries(st.sampled_from(["b", "a", "a b"]), JSON, max_size=2)
)


@st.composite
def replies(draw: st.DrawFn) -> View:
    """A reply as templates read it."""
    view: View = {"role": "assistant", "content": draw(TEXT)}
    if draw(st.booleans()):
        view["reasoning_content"] = draw(TEXT)
    if calls := draw(st.lists(CALL, max_size=2)):
        view["tool_calls"] = [
            {"type": "function", "id": f"call_3_{at}", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return view


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[str, ChatTemplate] = {}

    def get(name: str) -> ChatTemplate:
        if name not in made:
            made[name] = load_case(cases()[name], tmp_path_factory.mktemp("case"), make_tokenizer)
        return made[name]

    return get


def frames(form: ChatTemplate) -> list[ReplyFrame]:
    """Frames of a plain reply, of one with reasoning, and of one that calls tools."""
    kinds = [
        (ASSISTANT, USER),
        (ASSISTANT + REASONS, USER),
        (ASSISTANT + CALLS + BLANK, TOOL),
        (ASSISTANT + CALLS, TOOL),
    ]
    verdicts = [check_bridge(form, bytes([USER, reply]), bytes([new]), None) for reply, new in kinds]
    return [verdict.frame for verdict in verdicts if verdict.frame is not None]


def outcome(call: Callable[[], str | None]) -> str | None:
    try:
        return call()
    except RenderError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", slow_but(cases(), "gemma3", "gptoss", "qwen3", "llama3_2"))
@given(reply=replies())
@settings(max_examples=examples(60), deadline=None)
def test_a_reply_is_written_as_the_template_renders_it(load: Load, name: str, reply: View) -> None:
    form = load(name)
    for frame in form.__dict__.setdefault("frames", frames(form)):
        always_rendered = msgspec.structs.replace(frame, replies=_Full())
        assert shown(form, frame, reply) == shown(form, always_rendered, reply)


def shown(form: ChatTemplate, frame: ReplyFrame, reply: View) -> str | None:
    try:
        return form.bridges.shown_in(frame, reply)
    except RenderError as error:
        return f"refused: {error}"


class _Full(dict[Any, None]):
    """A frame's `replies` in which each shape has to be rendered."""

    def __contains__(self, shape: object) -> bool:
        return True


ARGUMENTS = {"b": "x", "a": 1}
REPLY: View = {
    "role": "assistant",
    "content": "Yes.",
    "tool_calls": [{"type": "function", "id": "call_0_0", "function": {"name": "f", "arguments": ARGUMENTS}}],
}
COPIES = {
    "as it is": "m.content + (c.arguments | tojson)",
    "trimmed": "m.content | trim + c.name + (c.arguments | tojson)",
    "line breaks trimmed": "m.content.strip('\\n') + (c.arguments | tojson)",
    "calls first": "(c.arguments | tojson) + m.content.lstrip()",
}
CHANGES = {
    "indented": "m.content + (c.arguments | tojson(indent=2))",
    "sorted": "m.content + (c.arguments | tojson(sort_keys=true))",
    "escaped": "m.content + (c.arguments | tojson(ensure_ascii=true))",
    "compact": "m.content + (c.arguments | tojson(separators=(',', ':')))",
    "as python": "m.content + (c.arguments | string)",
    "one by one": "m.content + (c.arguments.b | tojson)",
    "left out": "m.content",
    "upper": "(m.content | upper) + (c.arguments | tojson)",
    "html": "(m.content | replace('&', '&amp;')) + (c.arguments | tojson)",
    "cut": "m.content[:20] + (c.arguments | tojson)",
    "by its first character": "m.content[0] + m.content + (c.arguments | tojson)",
    "twice": "m.content + m.content + (c.arguments | tojson)",
    "by id": "m.tool_calls[0].id + m.content + (c.arguments | tojson)",
    "by type": "m.content + (c.arguments.b is string | string) + (c.arguments | tojson)",
}


@pytest.mark.parametrize(("name", "copies"), [(name, name in COPIES) for name in (COPIES | CHANGES)])
def test_only_what_is_copied_is_not_rendered(tmp_path: Path, name: str, copies: bool) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{{ " + (COPIES | CHANGES)[name] + " }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    template = JinjaSource(source, {})
    asked: View = {"role": "user", "content": "Q"}
    before = template.text([asked], None)

    def render(view: View) -> str | None:
        return template.text([asked, view], None).removeprefix(before)

    made = make_reply_text(render, REPLY)
    assert (made is not None) == copies
    if made is not None:
        assert made.write(parts_of(REPLY)) == render(REPLY)


def test_a_text_in_which_the_template_looks_for_something_is_rendered() -> None:
    pattern = re.compile("</think>|\n#")

    def inspected(text: str) -> bool:
        return pattern.search(text) is not None

    assert shape_of(REPLY, inspected) is not None
    for text in ("a</think>b", "a\n#"):
        call = REPLY["tool_calls"][0]
        for arguments in ({"b": text}, {"b": [{"c": text}]}, {text: 1}):
            changed = {**call, "function": {"name": "f", "arguments": arguments}}
            assert shape_of({**REPLY, "tool_calls": [changed]}, inspected) is None
        assert shape_of({**REPLY, "content": text}, inspected) is None
        assert shape_of({**REPLY, "reasoning_content": text}, inspected) is None
