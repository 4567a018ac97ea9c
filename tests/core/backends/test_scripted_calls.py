"""A scripted reply of text, reasoning and calls has the ids that the model would sample: those of the chat template's own text."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_kit import THINKING, make_tokenizer
from exactness import all_cases, cases, load_case
from slow_cases import slow_but

from engine.backends.scripted import write_reply
from engine.schemas.message import ToolCall
from engine.schemas.model import ModelSpec
from engine.schemas.script import ScriptedReply
from engine.tokens.choosing import TOOL, written
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

ASKED = {"role": "user", "content": "Q"}
ARGUMENTS: list[list[dict[str, Any]]] = [[{"text": "Paris"}], [{"text": "a", "count": 2}, {"flag": False}]]


def sampled(form: ChatTemplate, view: dict[str, Any]) -> str | None:
    """What a model samples for a reply: the template's text after the generation prompt."""
    shown = written(form, view)
    opened = None if shown is None else form.text([ASKED], [TOOL]).removeprefix(shown[0])
    return shown[1].removeprefix(opened) if shown is not None and shown[1].startswith(opened) else None


def check(form: ChatTemplate) -> int:
    """Check all combinations; how many there were."""
    found = 0
    for content, reasoning, arguments in product(("", "I look."), ("", "Hm.", "Hm.\n\nSo."), ARGUMENTS):
        calls = [{"name": "probe_tool", "arguments": given} for given in arguments[: form.calls_shown]]
        view: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and form.knows_reasoning:
            view["reasoning_content"] = reasoning
        shown = [{"type": "function", "id": f"call_0_{place}", "function": call} for place, call in enumerate(calls)]
        text = sampled(form, {**view, "tool_calls": shown})
        if text is None or not calls or (reasoning and reasoning not in text):
            continue
        scripts = [re.split(r"\s*<\|?tool_call", text)[0]]
        for said in scripts if reasoning else [*scripts, content]:
            ids = write_reply(form, ScriptedReply.model_validate({"text": said, "tool_calls": calls}))
            assert form.decode(ids[:-1]) == text
            assert ids == [*form.encode(text), form.stop_token_ids[0]]
            found += 1
    return found


@pytest.mark.parametrize(
    "name", slow_but(["qwen3", "qwen3_5_think", "glm4moe", "lfm2_2_5", "lfm2_v2"], "qwen3", "qwen3_5_think")
)
def test_a_scripted_reply_has_the_ids_that_the_model_would_sample(name: str, tmp_path: Path) -> None:
    assert check(load_case(cases()[name], tmp_path, make_tokenizer)) >= 8


@pytest.mark.slow
def test_a_scripted_reply_of_any_template_has_the_ids_that_its_model_would_sample(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    checked = {}
    for number, (name, folder) in enumerate(all_cases(tmp_path / "trl").items()):
        (tmp_path / str(number)).mkdir()
        form = load_case(folder, tmp_path / str(number), make_tokenizer)
        if form.reads_calls and not any(part in name for part in ("gptoss", "gemma4", "deepseek", "llama")):
            checked[name] = check(form)
    assert len(checked) > 30
    assert min(checked.values()) > 0, checked


THINK, CLOSE = "<think>", "</think>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nI look.", "Hm.", "I look."),
        ("<think>\nHm.\n</think>\n\n", "Hm.", ""),
        ("<think>Hm.</think>", "Hm.", ""),
        ("<think>Hm.</think>  I look. ", "Hm.", "I look."),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("I look.", None, "I look."),
        ("", None, ""),
    ],
)
def test_the_text_beside_scripted_calls_is_kept_and_its_markers_are_tokens(
    formats: Any, text: str, reasoning: str | None, content: str
) -> None:
    form = formats("thinking")
    reply = ScriptedReply.model_validate({"text": text, "tool_calls": [{"name": "f", "arguments": {"x": THINK}}]})
    ids = write_reply(form, reply)
    assert form.decode(ids).startswith(text.rstrip())
    for marker in (THINK, CLOSE):
        assert ids.count(form.fast.added[marker]) == text.count(marker)
    parsed = form.replies.parse(np.array(ids, np.int32), before=np.zeros(0, np.int32), turn=0)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert parsed.attempts == [ToolCall(id="call_0_0", name="f", arguments={"x": THINK})]


def test_a_call_format_of_the_spec_has_the_markers_of_the_text_too(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path, THINKING)
    form = load_format(ModelSpec(path=str(path), tool_calls="plain"), Path())
    reply = {"text": "<think>\nHm.\n</think>\n\nSo:", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    ids = write_reply(form, ScriptedReply.model_validate(reply))
    assert ids == [*form.encode("<think>\nHm.\n</think>\n\nSo:\n<call>f(x=1)</call>"), form.stop_token_ids[0]]
