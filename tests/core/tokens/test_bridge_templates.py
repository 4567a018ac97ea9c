"""The generic bridge: what is proved, what is refused, and that wrappers give what the template gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from chat_kit import PLAIN, make_tokenizer
from conversation_kit import said
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RenderError
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens import jinja
from engine.tokens import template as template_module
from engine.tokens.bridge import bridge as bridging
from engine.tokens.bridge import kinds as kinds_module
from engine.tokens.bridge.check import check_bridge, make_wrapper
from engine.tokens.bridge.kinds import (
    ASSISTANT,
    BLANK,
    CALLS,
    MARKED,
    ODD,
    REASONS,
    SYSTEM,
    TOOL,
    USER,
    Looked,
    MessageKinds,
    View,
    kind_of,
)
from engine.tokens.conversation import Conversation
from engine.tokens.jinja_template import JinjaTemplate
from engine.tokens.loading import load_format

Formats = Callable[..., JinjaTemplate]

HISTORIES: dict[str, tuple[list[int], list[int]]] = {
    "user": ([USER, ASSISTANT], [USER]),
    "system, user": ([SYSTEM, USER, ASSISTANT], [USER]),
    "reasoning, then user": ([USER, ASSISTANT + REASONS], [USER]),
    "call, then tool": ([USER, ASSISTANT + CALLS + BLANK], [TOOL]),
    "reasoned call, then tool": ([USER, ASSISTANT + REASONS + CALLS + BLANK], [TOOL]),
    "reasoned call, tool, answer, user": ([USER, ASSISTANT + REASONS + CALLS, TOOL, ASSISTANT], [USER]),
    "nothing": ([USER, ASSISTANT], []),
}
BRIDGE, REWRITE, NONE = "bridge", "rewrite", "none"
# A template that shows no calls has no bridge after one: such replies are shown to it as they were written.
WANTED = {
    "thinking": [BRIDGE, BRIDGE, REWRITE, BRIDGE, BRIDGE, REWRITE, REWRITE],
    "plain": [BRIDGE, BRIDGE, REWRITE, NONE, NONE, BRIDGE, BRIDGE],
    "alternating": [BRIDGE, NONE, REWRITE, NONE, NONE, NONE, BRIDGE],
    "unmarked": [NONE] * 7,
    "counting": [REWRITE, REWRITE, REWRITE, NONE, NONE, REWRITE, REWRITE],
    "dropping": [BRIDGE, BRIDGE, REWRITE, NONE, NONE, BRIDGE, BRIDGE],
    "prefilled": [REWRITE, REWRITE, BRIDGE, NONE, NONE, REWRITE, REWRITE],
}


@pytest.mark.parametrize("template", WANTED)
def test_what_is_bridged_and_what_begins_a_branch(formats: Formats, template: str) -> None:
    form = formats(template, renderer="template")
    found = []
    for kinds, new in HISTORIES.values():
        verdict = check_bridge(form, bytes(kinds), bytes(new), None)
        found.append(NONE if not verdict.bridged else REWRITE if verdict.rewrites else BRIDGE)
    assert dict(zip(HISTORIES, found, strict=True)) == dict(zip(HISTORIES, WANTED[template], strict=True))


def test_what_the_template_writes_is_what_transformers_writes(formats: Formats) -> None:
    for template in WANTED:
        form = formats(template, renderer="template")
        messages = [
            {"role": "user", "content": " Hm? "},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": "é"},
        ]
        wanted = form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert form.render(messages) == list(wanted)


CONTENT = st.lists(
    st.sampled_from(
        ["Try again.", " ", "\n", "\n\n", ".", "42", "é🙂", '"', "{{ x }}", "(x)", "\t", "<b>", "<|im_end|>"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("template", ["thinking", "plain", "alternating", "prefilled"])
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wrapper_gives_what_the_template_gives(formats: Formats, template: str, contents: list[str]) -> None:
    form = formats(template, renderer="template")
    role = "user" if template == "alternating" else "tool"
    new: list[View] = [{"role": role, "content": text} for text in contents[: 1 if template == "alternating" else 3]]
    reply: View = {"role": "assistant", "content": "42"}
    assert form.bridges.cached_bridge(reply, new, None) == form.unchecked_bridge(reply, new, None)


def test_wrappers_are_made_only_of_what_is_copied(formats: Formats, tmp_path: Path) -> None:
    reply: View = {"role": "assistant", "content": "42"}
    new: list[View] = [{"role": "tool", "content": "1", "name": "f", "tool_call_id": "call_0_0"}]
    assert make_wrapper(formats("plain"), reply, new, None) is not None
    changes = {
        "escaped": "m.content | tojson",
        "upper": "m.content | upper",
        "by id": "m.tool_call_id | default('') + m.content",
        "twice": "m.content + ' ' + m.content",
    }
    for name, expression in changes.items():
        source = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
            "{% if m.role == 'tool' %}{{ " + expression + " }}{% else %}{{ m.content }}{% endif %}"
            "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        )
        form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path / name, source)), renderer="template"), Path())
        assert make_wrapper(form, reply, new, None) is None


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        ({"role": "assistant", "content": "42"}, ASSISTANT),
        ({"role": "assistant", "content": " \n"}, ASSISTANT + BLANK),
        ({"role": "assistant", "content": "42", "reasoning_content": "Hm."}, ASSISTANT + REASONS),
        ({"role": "assistant", "content": "<think>\nHm.\n</think>\n\n42"}, ASSISTANT + MARKED),
        ({"role": "assistant", "content": "<think></think>42"}, ASSISTANT + ODD),
        ({"role": "assistant", "content": "Hm.</think>42"}, ASSISTANT + ODD),
        ({"role": "assistant", "content": "<think>a</think>b</think>c"}, ASSISTANT + ODD),
        ({"role": "assistant", "content": "a</think>", "reasoning_content": "Hm."}, ASSISTANT + ODD),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, ASSISTANT + CALLS + BLANK),
        ({"role": "assistant", "content": "x", "tool_calls": [{}, {}, {}]}, ASSISTANT + 2 * CALLS),
        ({"role": "user", "content": "<think>"}, USER),
    ],
)
def test_kinds_are_what_templates_look_at(view: View, kind: int) -> None:
    assert kind_of(view, Looked(("<think>", "</think>"))) == kind


def test_markers_that_a_template_does_not_name_are_only_text(formats: Formats) -> None:
    view = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n42"}
    assert kind_of(view, Looked()) == ASSISTANT
    assert MessageKinds().add(ASSISTANT + ODD + CALLS).odd


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "bare", "")
    with pytest.raises(RenderError, match=r"has no chat template; name a Jinja file in model\.chat_template"):
        load_format(ModelSpec(path=str(folder)), Path())


def test_a_template_of_the_specs_own_replaces_the_tokenizers(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<s>{{ m.content }}<|im_end|>{% endfor %}<s>")
    form = load_format(ModelSpec(path=str(tokenizer_dirs["plain"]), chat_template="mine.jinja"), tmp_path)
    assert form.decode(form.render([{"role": "user", "content": "Hm?"}])) == "<s>Hm?<|im_end|><s>"
    with pytest.raises(RenderError, match=r"model\.chat_template: no\.jinja cannot be read"):
        load_format(ModelSpec(path=str(tokenizer_dirs["plain"]), chat_template="no.jinja"), tmp_path)


LATER_WORDS = """\
{{- '<|im_start|>system\\n' + ('Hurry.' if messages[-1].content.endswith('quickly') else 'Relax.') + '<|im_end|>\\n' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_format_can_render_the_whole_conversation_from_any_turn_on(tmp_path: Path) -> None:
    """Even a tape that is wrong already is left: what was decided by probes before is not trusted."""
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path / "words", LATER_WORDS))), Path())
    conversation = Conversation(form, [])
    conversation.open([Message(role="user", content="Go.")])
    for turn, (text, whole, tapes) in enumerate(
        [
            ("Go quickly", None, None),
            ("Go.", "a reason", None),
            ("Slowly.", "a reason", 0),
            ("Go quickly", "a reason", 1),
        ]
    ):
        conversation.prompt()
        before = len(conversation.tapes)
        conversation.reply(said(form, "Yes.<|im_end|>"), turn)
        form.bridges.whole = whole
        conversation.add([Message(role="user", content=text)])
        prompt = conversation.prompt().tolist()
        if whole is not None:
            assert prompt == form.render(conversation.messages)
        if tapes is not None:
            assert len(conversation.tapes) - before == tapes
    assert conversation.tapes[-1].reason == (
        "the template writes '>system\\nHurry.<|im_end|>\\n<|im_start|>user\\nGo.<|i' "
        "where the tape has '>system\\nRelax.<|im_end|>\\n<|im_start|>user\\nGo.<|i'"
    )


DATED = "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + PLAIN


def test_a_conversation_that_goes_on_after_midnight_shows_the_new_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path / "dated", DATED))), Path())
    now = datetime(2026, 3, 1, 23, 59)
    _set_clock(monkeypatch, lambda: now)
    old = Conversation(form, [])
    old.open([Message(role="user", content="Go.")])
    for turn in range(3):
        now = datetime(2026, 3, 1 + turn // 2, 12)
        prompt = form.decode(old.prompt())
        assert prompt == form.decode(form.render(old.messages))
        assert f"Today is 0{now.day} Mar 2026" in prompt
        old.reply(said(form, "Yes.<|im_end|>"), turn)
        old.add([Message(role="user", content="Go on.")])
    assert [tape.reason != "" for tape in old.tapes] == [False, True]
    fresh = Conversation(form, [])
    fresh.open([Message(role="user", content="Go.")])
    assert "Today is 02 Mar 2026" in form.decode(fresh.prompt())


def test_a_conversation_that_begins_on_a_later_day_gets_no_bridge_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = PLAIN.replace("+ m.role +", "+ m.role + (strftime_now(' %d %b') if m.role == 'user' else '') +")
    assert dated != PLAIN
    now = datetime(2026, 3, 1, 12)
    _set_clock(monkeypatch, lambda: now)
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path / "dated", dated))), Path())
    for day in (1, 2):
        now = datetime(2026, 3, day, 12)
        conversation = Conversation(form, [])
        conversation.open([Message(role="user", content="Go.")])
        conversation.prompt()
        conversation.reply(said(form, "Yes.<|im_end|>"), 0)
        conversation.add([Message(role="user", content="Go on.")])
        assert form.decode(conversation.prompt()) == form.decode(form.render(conversation.messages))
        assert [tape.reason for tape in conversation.tapes] == [""]


def _set_clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], datetime]) -> None:
    clock = type("Clock", (), {"now": now, "today": lambda: now().date()})
    for module in (jinja, template_module, bridging, kinds_module):
        monkeypatch.setattr(module, "datetime" if module is jinja else "date", clock)


@pytest.mark.parametrize("contents", [[], ["one"], ["one", "two, and (three)\n"]])
def test_a_wrapper_keeps_as_ids_what_lies_beyond_added_tokens(formats: Formats, contents: list[str]) -> None:
    form = formats("plain")
    reply = {"role": "assistant", "content": "Yes."}
    new = [{"role": "user", "content": content} for content in contents]
    made = make_wrapper(form, reply, new, None)
    assert made is not None
    assert made.bridge(form, contents) == form.unchecked_bridge(reply, new, None)
    assert bool(made.head and made.tail) == bool(contents)
