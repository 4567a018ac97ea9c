"""Known families: they read replies where that is proved, and render only where a spec names one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_kit import THINKING, make_tokenizer
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RenderError
from engine.schemas.message import MalformedCall, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.choosing import TOOL
from engine.tokens.conversation import Conversation
from engine.tokens.families import FamilyTemplate
from engine.tokens.jinja_template import JinjaTemplate
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate, rewritten_part

Formats = Callable[..., ChatTemplate]

_HEADERS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_GLM += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_KIMI = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"]
_KIMI += [
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "[BOS]",
    "[EOS]",
]

FAMILIES: dict[str, tuple[list[str], str]] = {
    "qwen3": ([], "<|im_end|>"),
    "prime-qwen3": ([], "<|im_end|>"),
    "nemotron-3": ([], "<|im_end|>"),
    "llama-3": (_HEADERS, "<|eot_id|>"),
    "glm-4.5": (_GLM, "<|endoftext|>"),
    "glm-5": (_GLM, "<|endoftext|>"),
    "kimi-k2": (_KIMI, "<|im_end|>"),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FamilyTemplate]:
    """`family(name, **model)`: a family on a tokenizer that has its special tokens."""
    folders: dict[str, Path] = {}
    made: dict[str, FamilyTemplate] = {}

    def get(name: str, **model: Any) -> FamilyTemplate:
        if name not in folders:
            extra, eos = FAMILIES[name]
            folders[name] = make_tokenizer(tmp_path_factory.mktemp("family"), THINKING, extra, eos)
        key = f"{name} {sorted(model.items())}"
        if key not in made:
            form = load_format(ModelSpec(path=str(folders[name]), renderer=name, **model), Path())
            assert isinstance(form, FamilyTemplate)
            made[key] = form
        return made[key]

    return get


def test_auto_reads_by_a_family_that_is_proved_to_read_this_template(formats: Formats) -> None:
    form = formats("thinking")
    assert isinstance(form, JinjaTemplate)
    assert form.reader is not None
    assert (form.reader.name, form.knows_tools, form.knows_tool_results, form.knows_reasoning) == (
        "qwen3",
        True,
        True,
        True,
    )
    assert (form.calls_shown, rewritten_part(form.text), form.vocab_size) == (2, "reasoning", 448)


def test_auto_renders_by_the_template_and_nothing_else(tmp_path: Path) -> None:
    """A template that departs from its family's by one word is rendered as it is, and read as the family reads."""
    one_word_off = THINKING.replace("You may call one or more functions", "You may call some functions")
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path, one_word_off))), Path())
    assert form.reader is not None
    assert "You may call some functions" in form.decode(form.render([{"role": "user", "content": "Q"}], [TOOL]))


def test_auto_takes_no_reader_on_likeness(tmp_path: Path) -> None:
    """The family's tokens and tags, but arguments in another place: nothing reads these calls, and tools are refused."""
    other = THINKING.replace('"arguments": ', '"given": ')
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path, other))), Path())
    assert (form.reader, form.call_format) == (None, None)
    with pytest.raises(RenderError, match=r"no reader reads the calls.*set model\.tool_calls: hermes or plain"):
        Conversation(form, [TOOL])
    Conversation(form, [])


def test_a_family_that_does_not_exist_or_fit_is_refused(formats: Formats) -> None:
    with pytest.raises(RenderError, match=r"model\.renderer: 'qwen9' is unknown; write auto, template or deepseek-r1"):
        formats("plain", renderer="qwen9")
    with pytest.raises(RenderError, match=r"model\.renderer: kimi-k2 does not fit this model"):
        formats("plain", renderer="kimi-k2")
    with pytest.raises(RenderError, match=r"model\.renderer: qwen3 does not fit this model.*colour"):
        formats("thinking", renderer="qwen3", template_kwargs={"colour": "red"})


TEXTS = st.lists(
    st.sampled_from(
        ["Try again.", " ", "\n", "\n\n", ".", "42", "é🙂", "<think>", "</tool_response>", "<|im_end|>", "(x)"]
    ),
    max_size=5,
).map("".join)
ROLES = st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXTS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", FAMILIES)
@given(new=ROLES)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_extension_is_the_end_of_what_the_family_renders(
    name: str, family: Callable[..., FamilyTemplate], new: list[tuple[str, str]]
) -> None:
    form = family(name)
    views = [
        {"role": role, "content": text, **({"name": "f", "tool_call_id": "call_0_0"} if role == "tool" else {})}
        for role, text in new
    ]
    try:
        whole = form.render_views(
            [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "42"}, *views], None
        )
        found = form.bridges.cached_bridge({"role": "assistant", "content": "42"}, views, None)
    except RenderError:
        return
    if found is not None:
        tail = [*found.closing, *found.bridge]
        assert whole[-len(tail) :] == tail


def parse(form: ChatTemplate, text: str, prompt: str = "<|im_start|>assistant\n") -> Any:
    import numpy as np

    ids, before = np.array(form.encode(text), np.int32), np.array(form.encode(prompt), np.int32)
    return form.replies.parse(ids, before=before, turn=2, tools=[])


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_replies_are_read_by_token(formats: Formats) -> None:
    form = formats("thinking")
    found = parse(form, f"<think>\nHm.\n</think>\n\nSo:\n{CALL}\n{CALL}<|im_end|>")
    assert (found.reasoning, found.content, found.thinking, found.as_calls) == ("Hm.", "So:", False, True)
    assert found.attempts == [
        ToolCall(id="call_2_0", name="f", arguments={"x": 1}),
        ToolCall(id="call_2_1", name="f", arguments={"x": 1}),
    ]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<tool_call>\n{nonsense}\n</tool_call>", "Its arguments are not valid JSON."),
        ('<tool_call>\n{"name": "f"', "It was begun but never finished: its closing tag is missing."),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "It does not say which tool to call."),
        (
            '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
            'Its "arguments" are not a JSON object. Write {"name": "<tool>", "arguments": {...}}.',
        ),
    ],
)
def test_partly_malformed_replies_keep_every_attempt_in_order(formats: Formats, body: str, problem: str) -> None:
    found = parse(formats("thinking"), f"{CALL}\n{body}<|im_end|>")
    good, bad = found.attempts
    assert good == ToolCall(id="call_2_0", name="f", arguments={"x": 1})
    assert isinstance(bad, MalformedCall)
    assert bad.problem == problem
    assert found.content == found.body == f"{CALL}\n{body}"
    assert not found.as_calls


def test_words_behind_a_call_are_not_lost_to_a_branch(formats: Formats) -> None:
    form = formats("thinking")
    text = f"{CALL}\nThat is all.<|im_end|>"
    found = parse(form, text)
    assert not found.as_calls
    assert form.views.of_reply(found, form.encode(text))["content"] == f"{CALL}\nThat is all."


def test_reasoning_that_the_prompt_opened_is_reasoning(formats: Formats) -> None:
    for form in (formats("thinking"), formats("prefilled")):
        found = parse(form, "Hm.\n</think>\n\n42<|im_end|>", "<|im_start|>assistant\n<think>\n")
        assert (found.reasoning, found.content) == ("Hm.", "42")
        cut = parse(form, "Hm", "<|im_start|>assistant\n<think>\n")
        assert (cut.reasoning, cut.content, cut.thinking) == ("Hm", "", True)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("42", "42", None, []),
        (f"I add.\n{CALL}", "I add.", None, ["f"]),
        (f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}", "", "Hm.", ["f", "f"]),
    ],
)
def test_a_reply_of_an_endpoint_without_ids_is_read_by_the_family_too(
    formats: Formats, text: str, content: str, reasoning: str | None, calls: list[str]
) -> None:
    """A text reply is encoded and read by token: where only tool-call formats read text, its calls were answers."""
    form = formats("thinking")
    assert (form.call_format, form.reader is None) == (None, False)
    found = form.replies.parse_text(text, turn=3)
    assert (found.content, found.reasoning) == (content, reasoning)
    assert [(call.id, call.name) for call in found.attempts if isinstance(call, ToolCall)] == [
        (f"call_3_{number}", name) for number, name in enumerate(calls)
    ]
