"""The rules of an audit: rows that the engine's own conversations wrote have no finding, and each fault has exactly its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_kit import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but

from engine.errors import AuditError, RenderError
from engine.plugins.audit.audit import AuditReport, audit
from engine.plugins.audit.examine import RowFinding, TemplateMarks
from engine.plugins.audit.rows import ForeignRow
from engine.schemas.generation import FinishReason, Generation
from engine.schemas.message import Message
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate


@pytest.fixture
def form(formats: Callable[..., ChatTemplate]) -> ChatTemplate:
    return formats("plain", allow_special=True)


def conversation_row(
    form: ChatTemplate, prompt: list[Message], replies: list[str], answers: list[Message], **keys: Any
) -> ForeignRow:
    """The row of a conversation as the engine writes it: replies end with the stop token, and have a log-prob of -0.5."""
    conversation = Conversation(form, tools=[])
    conversation.open(prompt)
    for turn, reply in enumerate(replies):
        conversation.prompt()
        ids = np.asarray([*form.encode(reply), form.stop_token_ids[0]], np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        conversation.reply(Generation(output_ids=ids, logprobs=logprobs, finish=FinishReason(type="stop")), turn=turn)
        if turn < len(answers):
            conversation.add([answers[turn]])
    (branch,) = conversation.branches()
    start = branch.spans[0].end
    row = ForeignRow(
        place="row",
        group="g",
        prompt_ids=branch.input_ids[:start],
        response_ids=branch.input_ids[start:],
        loss_mask=branch.loss_mask[start:],
        logprobs=branch.logprobs[start:],
        versions=np.where(branch.loss_mask[start:] == 1, 4, -1).astype(np.int32),
        reward=1.0,
        finish="stop",
    )
    return replace(row, **keys)


def two_turns(form: ChatTemplate, **keys: Any) -> ForeignRow:
    prompt = [Message(role="user", content="What is 17 plus 25?")]
    return conversation_row(
        form, prompt, ["40?", "The answer is 42."], [Message(role="user", content="Try again.")], **keys
    )


def from_parts(form: ChatTemplate, *parts: tuple[str, int], **keys: Any) -> ForeignRow:
    """A row whose response is made of texts, each with its loss mask."""
    encoded = [(form.encode(text), trained) for text, trained in parts]
    ids = np.asarray([id_ for part, _ in encoded for id_ in part], np.int32)
    mask = np.asarray([trained for part, trained in encoded for _ in part], np.int32)
    row = two_turns(form)
    row = replace(
        row, response_ids=ids, loss_mask=mask, logprobs=None, versions=np.where(mask == 1, 4, -1).astype(np.int32)
    )
    return replace(row, **keys)


def found(report: AuditReport) -> list[tuple[str, str, int | None]]:
    return [(finding.rule, finding.severity, finding.token) for finding in report.findings]


def judged(form: ChatTemplate, *rows: ForeignRow, **keys: Any) -> list[tuple[str, str, int | None]]:
    return found(audit(rows, "verl", form, **keys)[0])


# --- rows without a fault -------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from("ab 12\n.é<"), min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("template", slow_but(sorted(TEMPLATES), "plain"))
@settings(max_examples=6)
@given(data=st.data())
def test_rows_that_the_engine_wrote_have_no_finding(
    formats: Callable[..., ChatTemplate], template: str, data: st.DataObject
) -> None:
    form = formats(template, allow_special=True)
    system = [Message(role="system", content=data.draw(WORDS))] if data.draw(st.booleans()) else []
    prompt = [*system, Message(role="user", content=data.draw(WORDS))]
    turns = data.draw(st.integers(1, 3))
    texts = [data.draw(WORDS) for _ in range(turns)]
    answers = [Message(role="user", content=data.draw(WORDS)) for _ in range(turns - 1)]
    try:
        row = conversation_row(form, prompt, texts, answers)
    except (RenderError, ValueError):  # the template refuses a system message, or begins a branch for this history
        return
    assert judged(form, row) == []


def test_a_prompt_is_read_back_only_if_it_renders_to_the_same_ids(form: ChatTemplate) -> None:
    marks = TemplateMarks(form)
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="One?"),
        Message(role="assistant", content="1"),
        Message(role="user", content="Two?"),
    ]
    ids = form.render(messages)
    assert marks.messages(ids) == messages
    assert marks.messages(ids[:-1]) is None
    assert marks.messages([]) is None


# --- one fault each -------------------------------------------------------------------------------------

USER = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
AFTER = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
FAULTS: dict[str, tuple[list[tuple[str, int]], dict[str, Any], list[tuple[str, str, str]]]] = {
    "nothing": ([("40?<|im_end|>", 1), (AFTER, 0), ("42.<|im_end|>", 1)], {}, []),
    "an observation is trained": (
        [("40?<|im_end|>", 1), (AFTER, 1), ("42.<|im_end|>", 1)],
        {},
        [("observation_trained", "error", "40?<|im_end|>\n"), ("closing_trained", "error", "40?<|im_end|>")],
    ),
    "a closing is trained": (
        [("40?<|im_end|>\n", 1), (AFTER[1:], 0), ("42.<|im_end|>", 1)],
        {},
        [("closing_trained", "error", "40?<|im_end|>")],
    ),
    "a stop token was added to a reply that was cut": (
        [("40?<|im_end|>", 1)],
        {"finish": "length"},
        [("closing_trained", "error", "40?")],
    ),
    "a stop token is not trained": (
        [("40?", 1), (USER, 0), ("42.<|im_end|>", 1)],
        {},
        [("missing_eos", "warning", "40?")],
    ),
    "a reply has no stop token inside": (
        [("40?", 1), (AFTER, 0), ("42.<|im_end|>", 1)],
        {},
        [("missing_eos", "warning", "40?"), ("prompt_not_template", "warning", "40?")],
    ),
    "a closing is missing": (
        [("40?<|im_end|>", 1), (AFTER[1:], 0), ("42.<|im_end|>", 1)],
        {},
        [("prompt_not_template", "warning", "40?<|im_end|>")],
    ),
    "text was put inside a reply": (
        [("<search>sums", 1), ("Result: 42", 0), ("42.<|im_end|>", 1)],
        {},
        [("prompt_not_template", "info", "<search>sums")],
    ),
    "an observation has no form": (
        [("40?<|im_end|>", 1), ("Sure?", 0), ("42.<|im_end|>", 1)],
        {},
        [("prompt_not_template", "warning", "40?<|im_end|>")],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_exactly_its_finding(form: ChatTemplate, fault: str) -> None:
    parts, keys, expected = FAULTS[fault]
    row = from_parts(form, *parts, **keys)
    assert row.prompt_ids is not None
    start = len(row.prompt_ids)
    places = [(rule, severity, start + len(form.encode(before))) for rule, severity, before in expected]
    assert judged(form, row) == places


def test_a_last_reply_without_a_stop_token_is_judged_by_what_the_row_says(form: ChatTemplate) -> None:
    row = from_parts(form, ("42.", 1))
    last = len(row.ids) - 1
    longer = from_parts(form, ("42 and more words.<|im_end|>", 1))
    assert judged(form, row) == [("missing_eos", "error", last)]
    assert judged(form, replace(row, finish="length")) == []
    assert judged(form, replace(row, finish=None)) == []  # the longest one: it may have been cut
    assert judged(form, replace(row, finish=None), longer) == [("missing_eos", "warning", last)]
    assert judged(form, row, stops=["2."]) == []


def test_a_prompt_that_is_not_rendered_is_found_at_its_first_other_token(form: ChatTemplate) -> None:
    row = two_turns(form)
    assert row.prompt_ids is not None
    rendered = row.prompt_ids.tolist()
    without = form.encode(
        "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
    )  # no default system text
    messages = [{"role": "user", "content": "What is 17 plus 25?"}]
    shared = next(at for at, (one, other) in enumerate(zip(without, rendered, strict=False)) if one != other)
    changed = replace(row, prompt_ids=np.asarray(without, np.int32), messages=messages)
    assert judged(form, changed) == [("prompt_not_template", "warning", shared)]
    assert judged(form, replace(row, messages=messages)) == []
    assert judged(form, replace(changed, images=True)) == []
    assert row.response_ids is not None
    assert row.loss_mask is not None
    moved = {  # the generation prompt counts as response, with loss mask 0
        "prompt_ids": row.prompt_ids[:-3],
        "response_ids": np.concatenate([row.prompt_ids[-3:], row.response_ids]),
        "loss_mask": np.concatenate([np.zeros(3, np.int32), row.loss_mask]),
    }
    assert judged(form, replace(row, **moved, logprobs=None, versions=None, row_versions=(1,))) == []


# --- the sampler's record -------------------------------------------------------------------------------


def split_ids(form: ChatTemplate, text: str) -> tuple[list[int], int]:
    """Ids of a text that are not what the tokenizer makes of it, and the first of them that differs."""
    whole = form.encode(text)
    for cut in range(1, len(text)):
        parts = form.encode(text[:cut]) + form.encode(text[cut:])
        if parts != whole and form.decode(parts) == text:
            return parts, next(at for at, (one, other) in enumerate(zip(parts, whole, strict=False)) if one != other)
    raise AssertionError(text)


def test_ids_that_were_encoded_again_are_proved_by_the_record(form: ChatTemplate) -> None:
    stop = form.stop_token_ids[0]
    sampled, at = split_ids(form, "The answer is 42.")
    again = from_parts(form, ("The answer is 42.<|im_end|>", 1))
    assert again.prompt_ids is not None
    record = [np.asarray([*sampled, stop], np.int32)]
    assert judged(form, again, sampled=record) == [("retokenized", "error", len(again.prompt_ids) + at)]
    as_sampled = replace(again, response_ids=record[0], loss_mask=None, versions=np.full(len(record[0]), 4, np.int32))
    assert judged(form, as_sampled, sampled=record) == []
    assert audit([as_sampled], "verl", form)[0].unusual == 1
    assert judged(form, again) == []  # without the record nothing shows it


def test_an_earlier_row_of_the_same_episode_proves_it_too(form: ChatTemplate) -> None:
    stop = form.stop_token_ids[0]
    sampled, at = split_ids(form, "The answer is 42.")
    first = from_parts(form, ("x", 1), trajectory="t")
    first = replace(
        first,
        response_ids=np.asarray([*sampled, stop], np.int32),
        loss_mask=None,
        versions=np.full(len(sampled) + 1, 4, np.int32),
    )
    assert first.prompt_ids is not None
    text = form.decode(first.ids) + AFTER
    again = from_parts(
        form, ("Yes.<|im_end|>", 1), trajectory="t", prompt_ids=np.asarray(form.encode(text), np.int32), group="g"
    )
    kept = replace(again, prompt_ids=np.asarray([*first.ids, *form.encode(AFTER)], np.int32))
    findings = judged(form, first, again)
    assert findings == [("retokenized", "error", len(first.prompt_ids) + at)]
    assert [rule for rule, _, _ in judged(form, first, kept)] == [
        "prompt_not_template"
    ]  # what was sampled is not what the text encodes to


def test_what_no_sampling_made_is_found_by_the_record(form: ChatTemplate) -> None:
    record = [np.asarray(form.encode("<search>sums"), np.int32), np.asarray(form.encode("42.<|im_end|>"), np.int32)]
    joined = from_parts(form, ("<search>sums", 1), ("\nResult: 42\n", 1), ("42.<|im_end|>", 1))
    assert joined.prompt_ids is not None
    start = len(joined.prompt_ids) + len(record[0])
    assert judged(form, joined, sampled=record) == [("observation_trained", "error", start)]


def test_trained_tokens_that_the_record_does_not_have(form: ChatTemplate) -> None:
    row = from_parts(form, ("42.<|im_end|>", 1), finish="length")
    cut = from_parts(form, ("4", 1), finish="length")
    assert row.prompt_ids is not None
    other = np.asarray(form.encode("Other words.<|im_end|>"), np.int32)
    start = len(row.prompt_ids)
    assert judged(form, row, sampled=[other]) == [("observation_trained", "warning", start)]
    assert row.response_ids is not None
    assert judged(form, row, cut, sampled=[other, row.response_ids]) == []


def test_an_added_or_lost_stop_token_is_found_by_the_record(form: ChatTemplate) -> None:
    with_stop, without = from_parts(form, ("42.<|im_end|>", 1)), from_parts(form, ("42.", 1))
    last = len(without.ids) - 1
    assert judged(form, with_stop, sampled=[without.response_ids]) == [("closing_trained", "error", last + 1)]
    assert judged(form, without, sampled=[with_stop.response_ids]) == [("missing_eos", "error", last)]
    assert judged(form, without, sampled=[without.response_ids]) == []


# --- rewards, groups, versions --------------------------------------------------------------------------


def test_rewards_that_reach_no_token(form: ChatTemplate) -> None:
    row = two_turns(form)
    size = len(row.mask)
    rewards = np.zeros(size)
    masked = int(np.flatnonzero(row.mask == 0)[0])
    rewards[[masked, size - 1]] = 0.25, 0.75
    assert row.prompt_ids is not None
    cases: list[tuple[ForeignRow, list[tuple[str, str, int | None]]]] = [
        (row, []),
        (replace(row, loss_mask=np.zeros(size, np.int32)), [("reward_unseen", "error", None)]),
        (replace(row, loss_mask=np.zeros(size, np.int32), reward=0.0), []),
        (replace(row, reward=float("nan")), [("reward_unseen", "error", None)]),
        (replace(row, excluded=True), [("reward_unseen", "warning", None)]),
        (replace(row, turn_rewards=(0.5, 0.5)), [("reward_unseen", "warning", None)]),
        (replace(row, token_rewards=rewards), [("reward_unseen", "warning", len(row.prompt_ids) + masked)]),
        (replace(row, token_rewards=np.where(row.mask == 1, rewards, 0)), []),
    ]
    for case, expected in cases:
        assert judged(form, case) == expected


def test_groups_that_mix_prompts_or_answers(form: ChatTemplate) -> None:
    row = two_turns(form, label="42")
    prompt = [Message(role="user", content="What is 8 times 7?")]
    other = conversation_row(form, prompt, ["56."], [])
    findings = audit([row, other, replace(row, label="41"), replace(other, group="h")], "verl", form)[0].findings
    assert [(finding.rule, finding.severity, finding.row) for finding in findings] == [
        ("mixed_group", "error", 1),
        ("mixed_group", "error", 2),
    ]
    step = (
        replace(row, trajectory="a"),
        replace(other, trajectory="a"),
    )  # later rows of one episode begin with other prompts
    assert judged(form, *step) == []
    report = audit([replace(row, group="")], "verl", form)[0]
    assert report.not_judged["mixed_group"] == {"the row names no group": 1}


def test_versions_that_are_missing(form: ChatTemplate) -> None:
    row = two_turns(form)
    assert row.versions is not None
    none = replace(row, versions=None)
    half = row.versions.copy()
    half[-1] = -1
    assert found(audit([none, none], "verl", form)[0]) == [("no_versions", "info", None)]
    assert judged(form, row, none) == [("no_versions", "warning", None)]
    assert judged(form, replace(none, row_versions=(4,))) == []
    assert judged(form, replace(none, row_versions=(4, 5))) == [("no_versions", "warning", None)]
    assert judged(form, replace(row, versions=half)) == [("no_versions", "warning", len(row.ids) - 1)]


def test_rows_of_texts_say_what_was_not_judged(form: ChatTemplate) -> None:
    row = ForeignRow(
        place="line 1", group="g", prompt_text="17 + 25?", response_text="42.", reward=1.0, row_versions=(3,)
    )
    report, _ = audit([row], "verl", form)
    assert report.findings == []
    tokens = ("retokenized", "observation_trained", "closing_trained", "missing_eos", "prompt_not_template")
    assert {rule: dict(reasons) for rule, reasons in report.not_judged.items() if reasons} == {
        rule: {"the row holds only texts": 1} for rule in tokens
    }


def test_an_id_outside_of_the_vocabulary_means_another_model(form: ChatTemplate) -> None:
    row = two_turns(form)
    assert row.response_ids is not None
    ids = row.response_ids.copy()
    ids[0] = form.vocab_size
    with pytest.raises(AuditError, match=f"holds the id {form.vocab_size}, and the model's vocabulary"):
        audit([replace(row, response_ids=ids)], "verl", form)


PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "user",
    "assistant",
    "system",
    "\n",
    "a",
    "<think>",
    "</think>",
    "<|endoftext|>",
    "é",
    " ",
]


@pytest.mark.parametrize("template", slow_but(sorted(TEMPLATES), "plain"))
@settings(max_examples=12)
@given(data=st.data())
def test_any_ids_and_masks_are_judged(formats: Callable[..., ChatTemplate], template: str, data: st.DataObject) -> None:
    form = formats(template, allow_special=True)
    texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
    prompt, response = form.encode(data.draw(texts)), form.encode(data.draw(texts))
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
    row = ForeignRow(
        place="row",
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(response, np.int32),
        loss_mask=np.asarray(mask, np.int32),
        reward=data.draw(st.sampled_from([0.0, 1.0, float("nan")])),
        finish=data.draw(st.sampled_from([None, "stop", "length"])),
    )
    sampled = (
        [np.asarray(response[: data.draw(st.integers(0, len(response)))], np.int32)]
        if data.draw(st.booleans())
        else None
    )
    report, _ = audit([row], "verl", form, sampled=sampled)
    assert all(finding.token is None or 0 <= finding.token < len(row.ids) for finding in report.findings)


def test_a_finding_is_one_line_with_row_token_and_rule() -> None:
    finding = RowFinding(rule="missing_eos", severity="error", row=3, place="a.pt row 3", token=17, message="words")
    assert str(finding) == "a.pt row 3 token 17: error[missing_eos] words"
