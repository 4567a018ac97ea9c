"""Exactness on real tokenizers and real chat templates: `scripts/fetch_tokenizers.sh FOLDER` brings them.

They run where EPISODE_ENGINE_TOKENIZERS names that folder, and say so where it does not. The templates are also
those that the package `trl` ships, where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation_kit import to_the_end
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.schemas.generation import FinishReason, Generation
from engine.schemas.message import Message, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.check import check_bridge
from engine.tokens.bridge.kinds import ASSISTANT, CALLS, REASONS, SYSTEM, TOOL, USER
from engine.tokens.conversation import Conversation
from engine.tokens.jinja_template import JinjaSource, JinjaTemplate
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import FastTokenizer

FOLDER = os.environ.get("EPISODE_ENGINE_TOKENIZERS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER,
        reason="NOT CHECKED ON REAL TOKENIZERS: run scripts/fetch_tokenizers.sh and set EPISODE_ENGINE_TOKENIZERS",
    ),
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather, °C.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def real() -> Callable[..., ChatTemplate]:
    made: dict[str, ChatTemplate] = {}

    def get(name: str, **model: Any) -> ChatTemplate:
        key = f"{name} {sorted(model.items())}"
        if key not in made:
            made[key] = load_format(ModelSpec(path=str(Path(FOLDER) / name), **model), Path())
        return made[key]

    return get


def reply(form: ChatTemplate, text: str) -> Generation:
    ids = form.encode(text)
    return Generation.read({"output_ids": ids, "logprobs": [-0.5] * len(ids), "finish": FinishReason(type="stop")})


def template_ids(
    form: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """What transformers makes of a conversation, without anything of ours in between."""
    return list(
        form.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    )


@pytest.mark.parametrize(
    ("name", "model", "format_", "end"),
    [
        ("qwen3", {}, "template", "<|im_end|>"),
        ("qwen3", {"renderer": "qwen3"}, "qwen3", "<|im_end|>"),
        ("qwen3", {"renderer": "template"}, "template", "<|im_end|>"),
        ("qwen2_5", {}, "template", "<|im_end|>"),
        ("llama3_1", {}, "template", "<|eot_id|>"),
        ("gemma3", {"tool_role": "user"}, "template", "<end_of_turn>"),
    ],
)
def test_canonical_conversations_have_the_templates_ids(
    real: Callable[..., ChatTemplate], name: str, model: dict[str, Any], format_: str, end: str
) -> None:
    form = real(name, **model)
    assert (form.name, form.stops[0]) == (format_, end)
    conversation = Conversation(form, [])
    said = [{"role": "user", "content": "What is 17 + 25, in words?"}]
    conversation.open([Message(role="user", content=said[0]["content"])])
    for turn, words in enumerate(["Forty-two.", "Yes:\n\n42", "“Bien sûr” 你好 🙂."]):
        assert conversation.prompt().tolist() == template_ids(form, said)
        conversation.reply(reply(form, words + end), turn)
        conversation.add([Message(role="user", content=f"Are you sure? ({turn})")])
        said += [{"role": "assistant", "content": words}, {"role": "user", "content": f"Are you sure? ({turn})"}]
    assert conversation.prompt().tolist() == template_ids(form, said)
    assert len(to_the_end(conversation)) == 1


@pytest.mark.parametrize("renderer", ["auto", "template"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
def test_tool_loops_have_the_templates_ids(real: Callable[..., ChatTemplate], name: str, renderer: str) -> None:
    form = real(name, renderer=renderer)
    conversation = Conversation(form, TOOLS)
    said: list[dict[str, Any]] = [{"role": "user", "content": "Is it warm in Paris?"}]
    conversation.open([Message(role="user", content=said[0]["content"])])
    why = "<think>\nI must look.\n</think>\n\n" if name == "qwen3" else ""
    for turn in range(3):
        assert conversation.prompt().tolist() == template_ids(form, said, TOOLS)
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        answered = conversation.reply(reply(form, f"{why}{call}\n{call}<|im_end|>"), turn)
        assert answered.attempts == [
            ToolCall(id=f"call_{turn}_{index}", name="weather", arguments={"city": "Paris"}) for index in range(2)
        ]
        results = [
            Message(role="tool", content=f"{turn}{index} °C", name="weather", tool_call_id=f"call_{turn}_{index}")
            for index in range(2)
        ]
        conversation.add(results)
        calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}] * 2
        said.append({"role": "assistant", "content": "", "tool_calls": calls})
        if why:
            said[-1]["reasoning_content"] = "I must look."
        said += [{"role": "tool", "content": message.content} for message in results]
    assert conversation.prompt().tolist() == template_ids(form, said, TOOLS)
    assert len(to_the_end(conversation)) == 1


TEXTS = st.lists(
    st.sampled_from(
        ["Try", " ", "\n", "\n\n", ".", ")", "42", "é", "🙂", "你好", "<think>", "</tool_response>", "<|im_end|>", "'s"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "gemma3"])
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sampled_ids_stay_as_they_were(real: Callable[..., ChatTemplate], name: str, data: st.DataObject) -> None:
    form = real(name, tool_role="user" if name == "gemma3" else "tool")
    added = st.sampled_from(sorted(form.fast.added.values()))
    ids = st.lists(st.integers(0, form.vocab_size - 1) | added, max_size=20)
    conversation = Conversation(form, [])
    conversation.open([Message(role="user", content="Go.")])
    for turn in range(3):
        prompt, sampled = conversation.prompt().copy(), data.draw(ids)
        conversation.reply(
            Generation.read(
                {"output_ids": sampled, "logprobs": [-0.5] * len(sampled), "finish": FinishReason(type="length")}
            ),
            turn,
        )
        place = conversation.turns[turn]
        conversation.add([Message(role=data.draw(st.sampled_from(["user", "tool"])), content=data.draw(TEXTS))])
        row = to_the_end(conversation)[place.branch]
        assert row.input_ids[: place.start].tolist() == prompt.tolist()
        assert row.input_ids[place.start : place.end].tolist() == sampled
        assert np.flatnonzero(row.turn_ids == turn).tolist() == list(range(place.start, place.end))


# --- the templates that trl ships ------------------------------------------------------------------------------------

_TRL = importlib.util.find_spec("trl")
TEMPLATES = (
    Path(_TRL.submodule_search_locations[0]) / "chat_templates" if _TRL and _TRL.submodule_search_locations else None
)

SPECIALS = re.compile(
    r"<\|[^|<>\s{}'\"]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|</?think>|<end_of_utterance>|<\|?turn\|?>|<\|?channel\|?>|</s>|<s>"
)
HISTORIES = [
    ([USER, ASSISTANT], [USER]),
    ([USER, ASSISTANT + REASONS], [USER]),
    ([USER, ASSISTANT + REASONS + CALLS], [TOOL]),
    ([SYSTEM, USER, ASSISTANT + CALLS, TOOL, ASSISTANT], [USER]),
]
"""A user after an answer, a user after reasoning, a tool after a reasoned call, a user after a tool loop."""
BRIDGED, BRANCHED, NONE = "=", "/", "."
"""One sign for each of HISTORIES: bridged; the template rewrites history; it shows no such conversation."""
FOUND = {
    "gemma3": "=/..",
    "gemma4": "=/.=",
    "glm4moe": "//=/",
    "idefics3": "=/.=",
    "llama3": "=/.=",
    "llama3_1": "=//=",
    "llama3_2": "=//=",
    "phi3_5": "=/.=",
    "qwen2_5": "=//=",
    "qwen3": "=/==",
    "qwen3_5_think": "//=/",
    "qwen3_6": "//=/",
    "qwen3_8": "/==/",  # its prompt opens <think>: an answer without thoughts is shown with empty ones
    "qwen3_instruct_2507": "=//=",
    "qwen3_vl": "=//=",
    "smolvlm": "=/.=",
    "deepseekv3": "//..",
    "deepseek_r1_distill": "//.=",
    "gptoss": "//./",
    "nemotron_3_nano": "//=/",
}


@pytest.mark.skipif(TEMPLATES is None, reason="trl is not installed")
@pytest.mark.parametrize("template", FOUND)
def test_which_real_templates_are_bridged(template: str) -> None:
    from transformers import AutoTokenizer

    assert TEMPLATES is not None
    tokenizer = AutoTokenizer.from_pretrained(Path(FOLDER) / "qwen2_5")
    source = (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer.add_tokens(sorted({*SPECIALS.findall(source), "<s>", "</s>"}), special_tokens=True)
    tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token = source, "<s>", "</s>"
    written = JinjaSource(source, tokenizer.special_tokens_map)
    form = JinjaTemplate(FastTokenizer(tokenizer), written, ModelSpec(path="x"), vocab_size=160_000, context=None)
    found = ""
    for kinds, new in HISTORIES:
        verdict = check_bridge(form, bytes(kinds), bytes(new), None)
        found += NONE if not verdict.bridged else BRANCHED if verdict.rewrites else BRIDGED
    assert found == FOUND[template]
