"""The GSM8K environment: graded by the model's words alone, and the right answer is never given away."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import environments
from engine.environments.answers import one_number
from engine.environments.gsm8k import Grader, Gsm8k, calculations, gold_answer
from engine.environments.tools.calculator import evaluate
from engine.schemas.environment import Environment, EpisodeView, Task, User, UserTurn
from engine.schemas.message import MalformedCall, Message, ToolCall
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]

SAMPLE = Path(environments.__file__).parent / "data" / "gsm8k" / "train_sample.jsonl"
ROWS: list[dict[str, str]] = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
TASKS = [Task(id=str(index), index=index, fields=row) for index, row in enumerate(ROWS)]
CLIPS = TASKS[0]
FORMAT = RewardEvent(name="format", value=0.1, cause="answer readable as hashes")


def test_they_fit_their_protocols() -> None:
    assert isinstance(Gsm8k(), Environment)
    assert isinstance(Grader(), User)


def test_the_sample_is_64_rows_with_its_licence() -> None:
    assert len(ROWS) == 64
    assert {frozenset(row) for row in ROWS} == {frozenset({"question", "answer"})}
    assert (SAMPLE.parent / "LICENSE").read_text().startswith("MIT License\n\nCopyright (c) 2021 OpenAI\n")


def test_every_marked_calculation_of_the_sample_is_what_the_calculator_says() -> None:
    steps = [step for task in TASKS for step in calculations(task)]
    assert len(steps) == 215
    assert [step for step in steps if evaluate(step[0]) != one_number(step[1])] == []


def test_the_first_task_is_read_whole() -> None:
    assert gold_answer(CLIPS) == 72
    assert calculations(CLIPS) == [("48/2", "24"), ("48+24", "72")]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("#### 72", 72), ("text\n#### 1,234", 1234), ("#### -3", -3), (18, 18), (2.5, Fraction(5, 2)), ("$7", 7)],
)
def test_gold_answers_may_be_solutions_or_bare_numbers(answer: Any, gold: Any) -> None:
    assert gold_answer(Task(id="t", index=0, fields={"answer": answer})) == gold


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "task 't' has no field `answer`; name it in `tasks.map`"),
        ({"answer": "none"}, "task 't': 'none' ends with no number; GSM8K answers end with `#### 42`"),
    ],
)
def test_a_task_without_a_gold_answer_fails_at_reset(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared whole)
        Gsm8k().reset(Task(id="t", index=0, fields={"question": "?"} | fields), seed=0)
    assert str(caught.value) == message


def test_reset_asks_the_question_and_says_how_long_the_solution_is() -> None:
    reset = Gsm8k(instruction="Answer as <answer>N</answer>.").reset(CLIPS, seed=0)
    assert reset.messages == [Message(role="user", content=f"{ROWS[0]['question']}\nAnswer as <answer>N</answer>.")]
    assert reset.facts == {"steps": 2}
    assert Gsm8k().reset(CLIPS, seed=0).messages[0].text == ROWS[0]["question"]


def test_a_right_first_answer_is_paid_for_itself_and_its_format(view: View) -> None:
    assert Grader().respond(view(CLIPS, "24 + 48 = 72\n#### 72")) == UserTurn(
        satisfied=True,
        solved=True,
        rewards=[FORMAT, RewardEvent(name="correct", value=1.0, cause="right answer")],
        facts={"graded": 0},
    )


def test_a_right_later_answer_is_paid_less_and_its_format_not_again(view: View) -> None:
    assert Grader(retry=0.5).respond(view(CLIPS, "#### 1", "hm", "#### 2", "#### 72")) == UserTurn(
        satisfied=True,
        solved=True,
        rewards=[RewardEvent(name="correct", value=0.25, cause="right answer")],
        facts={"graded": 3},
    )


def test_a_wrong_answer_is_told_the_direction(view: View) -> None:
    fields = {"answer": "70", "advice": "It is too low. Try again.", "tries": 1, "question": CLIPS.fields["question"]}
    assert Grader().respond(view(CLIPS, "#### 70")) == UserTurn(
        content="70 is not right. It is too low. Try again.",
        recover="wrong",
        fields=fields,
        rewards=[FORMAT],
        facts={"graded": 0},
    )
    assert Grader(format=0.0).respond(view(CLIPS, "#### 1", "#### 74")) == UserTurn(
        content="74 is not right. It is too high. Try again.",
        recover="wrong",
        fields=fields | {"answer": "74", "advice": "It is too high. Try again.", "tries": 2},
        facts={"graded": 1},
    )


def test_the_fields_are_those_that_the_grader_declares(view: View) -> None:
    for reply, name in (("#### 70", "wrong"), ("I do not know.", "no_answer")):
        turn = Grader().respond(view(CLIPS, reply))
        assert (turn.recover, sorted(turn.fields)) == (name, sorted(Grader.recover_fields[name]))


def test_step_hints_follow_the_solution_and_stop_before_the_answer(view: View) -> None:
    grader = Grader(hint="step", max_hints=3)
    replies = ["#### 1", "#### 2", "#### 3", "#### 4"]
    said = [grader.respond(view(CLIPS, *replies[: count + 1])).content for count in range(4)]
    assert said == [
        "1 is not right. A step that helps: 48/2 = 24. Try again.",
        "2 is not right. It is too low. Try again.",
        "3 is not right. It is too low. Try again.",
        "4 is not right. Try again.",
    ]


def test_no_hints_at_all(view: View) -> None:
    for grader in (Grader(hint="none"), Grader(max_hints=0)):
        assert grader.respond(view(CLIPS, "#### 1")).content == "1 is not right. Try again."


@pytest.mark.parametrize(
    ("styles", "asked"),
    [
        (["hashes"], "#### <number>"),
        (["tags", "hashes"], "<answer><number></answer>"),
        (["sentence"], "The answer is <number>."),
    ],
)
def test_an_unreadable_reply_is_told_the_first_format(view: View, styles: Any, asked: str) -> None:
    assert Grader(styles=styles).respond(view(CLIPS, "It is 72.")) == UserTurn(
        content=f"I cannot find your answer. End with: {asked}",
        recover="no_answer",
        fields={"tries": 0, "question": CLIPS.fields["question"]},
        facts={"graded": 0},
    )


def test_a_reply_that_was_cut_off_is_asked_to_be_shorter(view: View) -> None:
    assert Grader().respond(view(CLIPS, "#### 72", finish="length")) == UserTurn(
        content="Your reply was cut off. Be shorter, and end with: #### <number>",
        recover="no_answer",
        fields={"tries": 0, "question": CLIPS.fields["question"]},
        facts={"graded": 0},
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hint": "steps"}, "hint 'steps' is not known; write one of none, direction, step"),
        ({"max_hints": -1}, "max_hints is -1; write 0 or more"),
        ({"styles": ["xml"]}, r"styles \['xml'\] must be some of hashes, tags, sentence, last_number"),
        ({"styles": []}, r"styles \[\] must be some of"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader(**settings)


CALL = ToolCall(id="call_0_0", name="calculate", arguments={"expression": "1"})


def test_score_grades_a_last_answer_that_nobody_judged(view: View) -> None:
    paid = [RewardEvent(name="correct", value=0.5, cause="right answer")]
    assert Gsm8k(correct=0.5).score(view(CLIPS, "#### 1", "#### 72", facts={"graded": 0})) == paid
    assert Gsm8k(correct=0.5).score(view(CLIPS, "#### 72")) == paid


@pytest.mark.parametrize(
    ("reply", "changes"),
    [
        ("#### 72", {"facts": {"graded": 0}}),
        ("#### 72", {"finish": "length"}),
        ("#### 72", {"calls": [CALL]}),
        ("#### 72", {"malformed": [MalformedCall(raw="<call>", problem="not closed")]}),
        ("#### 71", {}),
        ("72", {}),
    ],
)
def test_score_pays_nothing_else(view: View, reply: str, changes: dict[str, Any]) -> None:
    assert Gsm8k().score(view(CLIPS, reply, **changes)) == []


@settings(deadline=None)
@given(
    task=st.sampled_from(TASKS),
    wrong=st.lists(st.integers(10**7, 10**8), min_size=1, max_size=8),
    hint=st.sampled_from(["none", "direction", "step"]),
)
def test_no_word_to_the_model_gives_the_answer_away(view: View, task: Task, wrong: list[int], hint: Any) -> None:
    grader = Grader(hint=hint, max_hints=8)
    gold = gold_answer(task)
    replies = [f"#### {number}" for number in wrong]
    for count in range(1, len(replies) + 1):
        turn = grader.respond(view(task, *replies[:count]))
        assert not turn.solved
        told = str(turn.content).split("not right.")[1]
        numbers = "".join(sign if sign.isdigit() or sign in ".," else " " for sign in told).split()
        assert gold not in [one_number(number.strip(".,")) for number in numbers]
    reset = Gsm8k().reset(task, seed=0)
    assert [message.text for message in reset.messages] == [task.fields["question"].strip()]


@given(words=st.text(alphabet=st.characters(exclude_characters="72"), max_size=80))
def test_only_the_models_own_words_can_solve(view: View, words: str) -> None:
    assert not Grader(styles=["hashes", "tags", "sentence", "last_number"]).respond(view(CLIPS, words)).solved
