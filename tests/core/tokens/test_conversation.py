"""Conversations: every prompt is the tape, every sampled id stays as it was, and branches are exact."""

from __future__ import annotations

import pytest
from conversation_kit import TOOLS, Formats, generation, said, to_the_end, tool, user

from engine.errors import BackendError, RenderError
from engine.schemas.generation import FinishReason, Generation
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate, rewritten_part


def test_canonical_replies_give_the_ids_of_the_template(formats: Formats) -> None:
    for name in ("thinking", "plain", "alternating", "unmarked"):
        form = formats(name)
        conversation = Conversation(form, [])
        conversation.open([user("What is 17 plus 25?")])
        assert conversation.prompt().tolist() == apply(form, conversation)
        for turn in range(3):
            conversation.reply(said(form, f"It is {turn}.{form.stops[0]}"), turn)
            conversation.add([user("That is not right.")])
            assert conversation.prompt().tolist() == apply(form, conversation)
        assert [branch.reason for branch in conversation.branches()] == [""] or name == "unmarked"


def apply(form: ChatTemplate, conversation: Conversation) -> list[int]:
    """What transformers itself makes of a conversation."""
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    ids = form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


def test_tool_calls_in_parallel_are_bridged_as_the_template_has_them(formats: Formats) -> None:
    for renderer in ("auto", "template"):
        form = formats("thinking", renderer=renderer)
        conversation = Conversation(form, TOOLS)
        conversation.open([user("What is 1 + 1, and 2 + 2?")])
        conversation.prompt()
        text = (
            '<think>\nTwo sums.\n</think>\n\n<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 2"}}\n</tool_call><|im_end|>'
        )
        reply = conversation.reply(said(form, text), 0)
        assert reply.reasoning == "Two sums."
        assert reply.attempts == [
            ToolCall(id="call_0_0", name="calculate", arguments={"expression": "1 + 1"}),
            ToolCall(id="call_0_1", name="calculate", arguments={"expression": "2 + 2"}),
        ]
        conversation.add([tool("2"), tool("4", "call_0_1")])
        prompt = conversation.prompt()
        assert len(conversation.branches()) == 1
        assert prompt.tolist() == form.render(conversation.messages, TOOLS)
        assert form.decode(prompt).endswith(
            "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_a_user_who_speaks_after_reasoning_begins_a_branch(formats: Formats) -> None:
    for renderer in ("auto", "template"):
        form = formats("thinking", renderer=renderer)
        conversation = Conversation(form, [])
        conversation.open([user("What is 17 plus 25?")])
        conversation.prompt()
        conversation.reply(said(form, "<think>\nHm.\n</think>\n\n41<|im_end|>"), 0)
        conversation.add([user("Try again.")])
        prompt = conversation.prompt()
        conversation.reply(said(form, "42<|im_end|>"), 1)
        conversation.add([user("Good.")])
        conversation.prompt()  # a reply without reasoning is shown as it was: no new branch
        first, second = conversation.branches()
        assert form.decode(prompt) == (
            "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n41<|im_end|>\n"
            "<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert form.decode(first.input_ids).endswith("<think>\nHm.\n</think>\n\n41<|im_end|>")
        assert form.decode(second.input_ids[second.loss_mask == 1]) == "42<|im_end|>"
        assert (first.reason, bool(second.reason)) == ("", True)
        assert [place.branch for place in conversation.turns] == [0, 1]


def test_keep_goes_on_with_the_sampled_reasoning(formats: Formats) -> None:
    for renderer in ("auto", "template"):
        form = formats("thinking", renderer=renderer)
        conversation = Conversation(form, [], "keep")
        conversation.open([user("What is 17 plus 25?")])
        conversation.prompt()
        conversation.reply(said(form, "<think>\nHm.\n</think>\n\n41<|im_end|>"), 0)
        conversation.add([user("Try again.")])
        assert form.decode(conversation.prompt()) == (
            "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n41<|im_end|>\n"
            "<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert len(conversation.branches()) == 1


def test_keep_refuses_where_no_token_ends_a_reply(formats: Formats) -> None:
    form = formats("unmarked")
    conversation = Conversation(form, [], "keep")
    conversation.open([user("Hm?")])
    conversation.prompt()
    conversation.reply(said(form, "42"), 0)
    conversation.add([user("Good.")])
    with pytest.raises(RenderError, match="no added token after a reply"):
        conversation.prompt()


def test_a_cut_reply_gets_its_closing_token_unmasked(formats: Formats) -> None:
    for name in ("thinking", "plain"):
        form = formats(name)
        conversation = Conversation(form, [])
        conversation.open([user("What is 17 plus 25?")])
        start = len(conversation.prompt())
        sampled = form.encode("<answer>42</answer> and")  # a stop string that overshoots
        conversation.reply(generation(sampled), 0)
        conversation.add([user("Good.")])
        prompt = conversation.prompt()
        (row,) = to_the_end(conversation)
        end = start + len(sampled)
        assert [(s.kind, s.start, s.end) for s in row.spans] == [
            ("prompt", 0, start),
            ("generated", start, end),
            ("closing", end, end + 1),
            ("bridge", end + 1, len(prompt)),
        ]
        assert form.decode(row.input_ids[start:]) == (
            "<answer>42</answer> and<|im_end|>\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert row.loss_mask.tolist() == [0] * start + [1] * len(sampled) + [0] * (len(prompt) - end)


def test_a_reply_cut_in_its_reasoning_is_closed_as_the_template_closes_reasoning(formats: Formats) -> None:
    for renderer in ("auto", "template"):
        form = formats("thinking", renderer=renderer)
        conversation = Conversation(form, TOOLS)
        conversation.open([user("What is 17 plus 25?")])
        conversation.prompt()
        sampled = form.encode("<think>\nLet me")
        reply = conversation.reply(generation(sampled, "length"), 0)
        assert (reply.content, reply.reasoning) == ("", "Let me")
        conversation.add([tool("too long")])
        prompt = conversation.prompt()
        (row,) = to_the_end(conversation)
        assert [s.kind for s in row.spans] == ["prompt", "generated", "closing", "bridge"]
        closing = row.spans[2]
        assert form.decode(row.input_ids[closing.start : closing.end]) == "\n</think>\n\n<|im_end|>"
        assert form.decode(prompt).endswith(
            "<think>\nLet me\n</think>\n\n<|im_end|>\n<|im_start|>user\n<tool_response>\ntoo long\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("history", ["branch", "keep"])
def test_another_token_that_ends_replies_begins_a_branch(formats: Formats, history: str) -> None:
    """Whatever ended the reply: the template writes one token there, and no other."""
    form = formats("thinking", renderer="qwen3")  # whose `<|endoftext|>` ends replies too
    conversation = Conversation(form, [], history)  # type: ignore[arg-type]
    conversation.open([user("Hm?")])
    start = len(conversation.prompt())
    conversation.reply(said(form, "42<|endoftext|>"), 0)
    conversation.add([user("Good.")])
    tail = "\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n"
    if history == "branch":
        assert form.decode(conversation.prompt()[start:]) == f"42<|im_end|>{tail}"
        assert (
            conversation.tapes[1].reason
            == "the reply ended with '<|endoftext|>', where the template writes '<|im_end|>'"
        )
    else:
        assert form.decode(conversation.prompt()[start:]) == f"42<|endoftext|><|im_end|>{tail}"
    rows = conversation.branches()
    assert [row.loss_mask.sum() for row in rows] == [len(form.encode("42<|endoftext|>"))]


def test_a_token_that_ends_no_reply_is_text(formats: Formats) -> None:
    form = formats("plain")
    conversation = Conversation(form, [])
    conversation.open([user("Hm?")])
    start = len(conversation.prompt())
    conversation.reply(said(form, "42<|endoftext|>"), 0)
    conversation.add([user("Good.")])
    tail = "\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n"
    assert form.decode(conversation.prompt()[start:]) == f"42<|endoftext|><|im_end|>{tail}"


def test_the_small_models_template_is_bridged_with_its_default_system_message(formats: Formats) -> None:
    form = formats("plain")
    assert (form.name, form.knows_tools, rewritten_part(form.text)) == ("template", False, None)
    conversation = Conversation(form, TOOLS)
    conversation.open([user("What is 3 * 4?")])
    conversation.prompt()
    reply = conversation.reply(said(form, "Let me see. <call>calculate(3 * 4)</call><|im_end|>"), 0)
    assert reply.attempts == [ToolCall(id="call_0_0", name="calculate", arguments={"expression": "3 * 4"})]
    assert reply.content == "Let me see."
    conversation.add([tool("12")])
    assert form.decode(conversation.prompt()) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is 3 * 4?<|im_end|>\n"
        "<|im_start|>assistant\nLet me see. <call>calculate(3 * 4)</call><|im_end|>\n<|im_start|>tool\n12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(conversation.branches()) == 1


def test_a_branch_shows_unreadable_calls_as_they_were_written(formats: Formats) -> None:
    for renderer in ("auto", "template"):
        form = formats("thinking", renderer=renderer)
        conversation = Conversation(form, TOOLS)
        conversation.open([user("Go.")])
        conversation.prompt()
        raw = '<tool_call>\n{"name": "calculate", \n</tool_call>'
        reply = conversation.reply(said(form, f"<think>\nHm.\n</think>\n\nSo:\n{raw}<|im_end|>"), 0)
        (attempt,) = reply.attempts
        assert isinstance(attempt, MalformedCall)
        assert "JSON" in attempt.problem
        assert conversation.messages[-1].tool_calls == []
        conversation.add([user("Try again.")])
        assert f"<|im_start|>assistant\nSo:\n{raw}<|im_end|>\n" in form.decode(conversation.prompt())


def test_tool_results_speak_as_a_user_where_the_template_has_no_tools(formats: Formats) -> None:
    form = formats("alternating", tool_role="user")
    conversation = Conversation(form, TOOLS)
    conversation.open([user("Hm?")])
    conversation.prompt()
    conversation.reply(said(form, "<call>calculate(1)</call><|im_end|>"), 0)
    conversation.add([tool("1"), user(" Well? ")])
    assert form.decode(conversation.prompt()).endswith(
        "<call>calculate(1)</call><|im_end|>\n<|im_start|>user\n1\n\n Well?<|im_end|>\n<|im_start|>model\n"
    )
    assert conversation.prompt().tolist() == form.render(conversation.thread.views(), TOOLS)


def test_nothing_that_the_template_would_lose_is_said(formats: Formats) -> None:
    for name in ("alternating", "dropping"):
        conversation = Conversation(formats(name), [])
        conversation.open([user("Hm?")])
        with pytest.raises(RenderError, match=r"model\.tool_role: user"):
            conversation.add([tool("1")])
    conversation = Conversation(formats("dropping"), [])
    conversation.open([Message(role="system", content="Be brief."), user("Hm?")])
    with pytest.raises(RenderError, match="role `system`"):
        conversation.prompt()


def test_a_template_that_refuses_is_an_error_that_says_so(formats: Formats) -> None:
    conversation = Conversation(formats("alternating"), [])
    conversation.open([Message(role="system", content="Be brief."), user("Hm?")])
    with pytest.raises(RenderError, match="roles must alternate"):
        conversation.prompt()


def test_only_the_model_replies(formats: Formats) -> None:
    conversation = Conversation(formats("plain"), [])
    conversation.open([user("Hm?"), Message(role="assistant", content="An example."), user("Now you.")])
    with pytest.raises(RenderError, match="only the model replies"):
        conversation.add([user("a"), Message(role="assistant", content="b")])
    assert len(conversation.messages) == 3


@pytest.mark.parametrize("wrong", [-1, 448, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_the_backends_fault(formats: Formats, wrong: int) -> None:
    conversation = Conversation(formats("plain"), [])
    conversation.open([user("Hm?")])
    conversation.prompt()
    with pytest.raises(BackendError, match=str(wrong)) as caught:
        conversation.reply(generation([5, wrong]), 0)
    assert (caught.value.kind, caught.value.blame) == ("bad_token", "backend")
    assert conversation.turns == []


def test_a_log_probability_that_is_no_number_is_the_backends_fault(formats: Formats) -> None:
    conversation = Conversation(formats("plain"), [])
    conversation.open([user("Hm?")])
    conversation.prompt()
    bad = Generation.read({"output_ids": [5, 6], "logprobs": [-1.0, float("nan")], "finish": FinishReason(type="stop")})
    with pytest.raises(BackendError) as caught:
        conversation.reply(bad, 0)
    assert caught.value.kind == "bad_logprob"


def test_a_backend_that_answers_in_text_trains_nothing(formats: Formats) -> None:
    form = formats("plain")
    conversation = Conversation(form, TOOLS)
    conversation.open([user("Hm?")])
    conversation.prompt()
    answer = Generation.read(
        {"output_ids": [], "logprobs": [], "finish": FinishReason(type="stop"), "text": "<call>calculate(2)</call>"}
    )
    reply = conversation.reply(answer, 0)
    assert [attempt.name for attempt in reply.attempts if isinstance(attempt, ToolCall)] == ["calculate"]
    conversation.add([tool("2")])
    assert conversation.prompt().tolist() == form.render(conversation.thread.views(), TOOLS)
    (row,) = conversation.branches()
    assert row.loss_mask.sum() == 0


def test_a_prompt_that_was_not_replied_to_leaves_no_row(formats: Formats) -> None:
    form = formats("thinking")
    conversation = Conversation(form, [])
    conversation.open([user("Hm?")])
    conversation.prompt()
    conversation.add([user("And?")])
    assert conversation.prompt().tolist() == form.render(conversation.messages)
    conversation.reply(said(form, "<think>\nHm.\n</think>\n\n41<|im_end|>"), 0)
    conversation.add([user("Try again.")])
    conversation.prompt()
    conversation.add([user("Please.")])
    conversation.prompt()
    (row,) = conversation.branches()
    assert row.input_ids.tolist() == [
        *form.render([user("Hm?"), user("And?")]),
        *form.encode("<think>\nHm.\n</think>\n\n41<|im_end|>"),
    ]


def test_a_tape_view_does_not_change_when_the_conversation_goes_on(formats: Formats) -> None:
    form = formats("plain")
    conversation = Conversation(form, [])
    conversation.open([user("Hm?")])
    views, copies = [], []
    for turn in range(20):
        prompt = conversation.prompt()
        views.append(prompt)
        copies.append(prompt.tolist())
        with pytest.raises(ValueError, match="read-only"):
            prompt[0] = 1
        conversation.reply(said(form, "42<|im_end|>"), turn)
        conversation.add([user("More.")])
    assert [view.tolist() for view in views] == copies


def test_length_is_that_of_the_current_branch(formats: Formats) -> None:
    form = formats("thinking")
    conversation = Conversation(form, [])
    assert conversation.length == 0
    conversation.open([user("Hm?")])
    assert conversation.length == 0
    assert conversation.characters == 3
    prompt = conversation.prompt()
    assert (conversation.length, conversation.characters) == (len(prompt), 0)
    conversation.reply(generation([1, 2, 3]), 0)
    assert conversation.length == len(prompt) + 3
