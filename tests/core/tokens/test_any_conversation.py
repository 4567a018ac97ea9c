"""Conversations of any length over many templates: every prompt is its branch, and every sampled id is trained once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversation_kit import TOOLS, Formats, generation, to_the_end, user
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_cases import slow_but

from engine.errors import RenderError
from engine.schemas.message import Message
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate

WORDS = [
    "What is 17 plus 25?",
    " ",
    "\n",
    "\n\n",
    ".",
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|im_start|>user\n",
    "<tool_response>",
    "</tool_response>",
    '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1"}}\n</tool_call>',
    "<call>calculate(3 * 4)</call>",
    "é你好🙂",
    "(Try again)",
]


TEXTS = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)


WRAPPED = TEXTS.map(lambda text: f"<tool_response>{text}</tool_response>")


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'


REPLIES = [
    "It is 42.",
    "",
    " \n",
    "<think>\nHm.\n</think>\n\n42",
    "<think></think>42",
    "<think>\nHm.",
    "Hm.\n</think>\n\n42",
    "<think>a</think>b</think>c",
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    f"<think>\nHm.\n</think>\n\n{CALL}",
    f"{CALL} and so on",
    f"<think>\nHm.\n</think>\n\n{CALL}\n<tool_call>\n{{\n</tool_call>",
    "<tool_call>\n{",
    "<call>calculate(3 * 4)</call>",
]


SPECIAL_IDS = list(range(430, 448))


@st.composite
def turns(draw: st.DrawFn, roles: tuple[str, ...], least: int) -> list[tuple[list[int] | str, bool, list[Message]]]:
    """Replies (ids, whether a stop token ends them) and what is said after each."""
    ids = st.lists(st.one_of(st.integers(0, 447), st.sampled_from(SPECIAL_IDS)), max_size=8)
    messages = st.lists(
        st.builds(lambda role, text: Message(role=role, content=text), st.sampled_from(roles), TEXTS | WRAPPED),
        min_size=least,
        max_size=3,
    )
    return draw(st.lists(st.tuples(ids | st.sampled_from(REPLIES), st.booleans(), messages), min_size=1, max_size=5))


CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...], int]] = {
    "family": ({"template": "thinking"}, "branch", ("user", "tool", "system"), 0),
    "family keeps": ({"template": "thinking"}, "keep", ("user", "tool", "system"), 1),
    "family without thinking": (
        {"template": "thinking", "renderer": "qwen3", "template_kwargs": {"enable_thinking": False}},
        "branch",
        ("user", "tool"),
        0,
    ),
    "thinking": ({"template": "thinking", "renderer": "template"}, "branch", ("user", "tool", "system"), 0),
    "thinking keeps": ({"template": "thinking", "renderer": "template"}, "keep", ("user", "tool"), 0),
    "plain": ({"template": "plain"}, "branch", ("user", "tool", "system"), 0),
    "plain keeps": ({"template": "plain"}, "keep", ("user", "tool", "system"), 0),
    "alternating": ({"template": "alternating", "tool_role": "user"}, "branch", ("user", "tool"), 1),
    "unmarked": ({"template": "unmarked"}, "branch", ("user", "tool"), 0),
    "counting": ({"template": "counting"}, "branch", ("user", "tool"), 0),
    "prefilled": ({"template": "prefilled"}, "branch", ("user", "tool"), 0),
    "prefilled keeps": ({"template": "prefilled"}, "keep", ("user", "tool"), 0),
}


def reply_ids(form: ChatTemplate, reply: list[int] | str, stopped: bool) -> list[int]:
    """The ids of a planned reply."""
    ids = form.encode(reply) if isinstance(reply, str) else reply
    return [*ids, form.stop_token_ids[0]] if stopped else ids


def play(
    form: ChatTemplate, history: str, first: str, plan: list[tuple[list[int] | str, bool, list[Message]]]
) -> tuple[Conversation, list[np.ndarray], list[list[int]]]:
    """Go through a plan; give the prompts and the replies."""
    conversation = Conversation(form, TOOLS, history)  # type: ignore[arg-type]
    conversation.open([user(first)])
    prompts, replies = [], []
    for turn, (ids, stopped, new) in enumerate(plan):
        prompt = conversation.prompt()
        prompts.append(prompt.copy())
        assert conversation.prompt().tolist() == prompt.tolist()
        reply = reply_ids(form, ids, stopped)
        conversation.reply(generation(reply, "stop" if stopped else "length", version=turn), turn)
        replies.append(reply)
        conversation.add(new)
    return conversation, prompts, replies


def check_exact(conversation: Conversation, prompts: list[np.ndarray], replies: list[list[int]]) -> None:
    """The properties that hold of every conversation."""
    branches = to_the_end(conversation)
    for branch in branches:
        n = len(branch.input_ids)
        assert [len(a) for a in (branch.loss_mask, branch.logprobs, branch.weight_versions, branch.turn_ids)] == [n] * 4
        assert [s.start for s in branch.spans] == [0, *(s.end for s in branch.spans[:-1])]
        assert branch.spans[-1].end == n
        assert branch.spans[0].kind == "prompt"
    covered = [np.zeros(len(branch.input_ids), np.int32) for branch in branches]
    assert len(conversation.turns) == len(replies)
    for turn, (place, prompt, ids) in enumerate(zip(conversation.turns, prompts, replies, strict=True)):
        index, start, end = place.branch, place.start, place.end
        row = branches[index]
        assert row.input_ids[:start].tolist() == prompt.tolist()
        assert row.input_ids[start:end].tolist() == ids
        assert row.logprobs[start:end].tolist() == [-0.125 * (i + 1) for i in range(len(ids))]
        assert row.turn_ids[start:end].tolist() == [turn] * len(ids)
        assert row.weight_versions[start:end].tolist() == [turn] * len(ids)
        assert [s for s in row.spans if s.turn == turn] == [
            s for s in row.spans if (s.start, s.end, s.kind) == (start, end, "generated")
        ]
        covered[index][start:end] += 1
    for row, mask in zip(branches, covered, strict=True):
        assert row.loss_mask.tolist() == mask.tolist()
        assert row.logprobs[mask == 0].tolist() == [0.0] * int((mask == 0).sum())
        assert set(row.weight_versions[mask == 0].tolist()) <= {-1}
        assert set(row.turn_ids[mask == 0].tolist()) <= {-1}


@pytest.mark.parametrize(
    "case",
    slow_but(CASES, "family keeps", "thinking", "unmarked"),
)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_prompt_is_its_branch_and_every_sampled_id_is_masked_once(
    case: str, formats: Formats, data: st.DataObject
) -> None:
    settings_, history, roles, least = CASES[case]
    form = formats(**settings_)
    plan = data.draw(turns(roles, least))
    try:
        conversation, prompts, replies = play(form, history, data.draw(TEXTS), plan)
    except RenderError as error:
        if history != "keep" and "refuses" not in str(error):
            raise  # a template may refuse, and a tape may not go on under `keep`; nothing else may go wrong
        return
    check_exact(conversation, prompts, replies)


@pytest.mark.parametrize("case", slow_but(CASES, "plain keeps", "prefilled"))
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_that_gets_no_reply_leaves_nothing_behind(case: str, formats: Formats, data: st.DataObject) -> None:
    """Asked for and taken back anywhere, prompts, branches and lengths are those of a conversation that never asked."""
    settings_, history, roles, least = CASES[case]
    form = formats(**settings_)
    plan = data.draw(turns(roles, least))
    first = data.draw(TEXTS)
    plain, tried = Conversation(form, TOOLS, history), Conversation(form, TOOLS, history)  # type: ignore[arg-type]
    plain.open([user(first)])
    tried.open([user(first)])

    def same() -> None:
        assert (tried.length, tried.characters) == (plain.length, plain.characters)
        assert [row.json() for row in to_the_end(tried)] == [row.json() for row in to_the_end(plain)]

    def attempt() -> None:
        given_before = None
        try:
            given_before = tried.prompt()
            kept = given_before.copy()
        except RenderError:  # one that cannot be made leaves nothing behind either
            pass
        tried.take_back()
        same()
        if given_before is not None:
            assert given_before.tolist() == kept.tolist()

    try:
        for turn, (ids, stopped, new) in enumerate(plan):
            attempt()
            prompt = plain.prompt()
            assert tried.prompt().tolist() == prompt.tolist()
            for conversation in (plain, tried):
                conversation.reply(generation(reply_ids(form, ids, stopped)), turn)
            for message in new:
                plain.add([message])
                tried.add([message])
                attempt()
            tried.take_back()
            same()
    except RenderError as error:
        if history != "keep" and "refuses" not in str(error):
            raise


@pytest.mark.parametrize(
    "case",
    slow_but([name for name, case in CASES.items() if case[1] == "branch"], "plain", "counting"),
)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bridge_is_what_the_whole_conversation_renders_to(case: str, formats: Formats, data: st.DataObject) -> None:
    """The proof is made on probes; here its claims are checked on the very messages that were said."""
    settings_, history, roles, least = CASES[case]
    form = formats(**settings_)
    plan = data.draw(turns(roles, least))
    conversation = Conversation(form, TOOLS, history)  # type: ignore[arg-type]
    conversation.open([user(data.draw(TEXTS))])
    try:
        shown = form.render(conversation.thread.views(), TOOLS)
        for turn, (ids, stopped, new) in enumerate(plan):
            conversation.prompt()
            tapes = len(conversation.tapes)
            conversation.reply(generation(reply_ids(form, ids, stopped)), turn)
            conversation.add(new)
            following = conversation.prompt()
            whole = form.render(conversation.thread.views(), TOOLS)
            if len(conversation.tapes) > tapes:
                assert following.tolist() == whole
            else:
                last = conversation.tapes[-1].spans[-1]
                assert last.kind == "bridge"
                assert whole[len(whole) - (last.end - last.start) :] == following[last.start :].tolist()
                assert form.decode(whole).startswith(form.decode(shown))
            shown = whole
    except RenderError as error:
        if "refuses" not in str(error):
            raise
