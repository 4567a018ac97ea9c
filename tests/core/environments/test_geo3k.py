"""Geometry3K: the public layouts become one, only the model's words are graded, and the answer is never shown."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from engine.environments.geo3k import SHIPPED, Geo3k, Geo3kTool, Grader, Reminder, ask, gold_answer, problems
from engine.schemas.environment import Environment, EpisodeView, Reset, Task, ToolReply, User, UserTurn
from engine.schemas.message import ImagePart, MalformedCall, Message, TextPart, ToolCall
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]

ROWS = list(problems())
TASKS = [Task(id=row["id"], index=index, fields=row) for index, row in enumerate(ROWS)]
TASK = Task(
    id="t",
    index=0,
    fields={"question": "<image>Find x.", "images": ["/p/a.png"], "answer": "\\frac{8}{15}", "tolerance": 0.01},
)
RIGHT = [RewardEvent(name="correct", value=1.0, cause="right answer")]


def test_they_fit_their_protocols() -> None:
    assert isinstance(Geo3k(), Environment)
    assert isinstance(Geo3kTool(), Environment)
    assert isinstance(Grader(), User)
    assert isinstance(Reminder(), User)


# --- the problems that ship ---------------------------------------------------------------------------------


def test_301_problems_ship_with_their_licence() -> None:
    assert len(ROWS) == len({row["id"] for row in ROWS}) == 301
    assert (SHIPPED.parent / "LICENSE").read_text().startswith("MIT License\n\nCopyright (c) 2021 Pan Lu\n")
    assert (
        (SHIPPED.parent / "README.md").read_text().startswith("# geo3k: 301 geometry problems with redrawn pictures\n")
    )
    assert sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file()) < 1_000_000


def test_the_first_problem_is_read_whole() -> None:
    question = (
        "In the figure, O is the center of the circle. The radius of circle O is 13. OB is a radius of circle O. CD is a "
        "chord of circle O. OB is perpendicular to CD. CD = 24. Find the length of OX. Give a numeric answer, rounded to "
        "two decimal places if it is not an integer."
    )
    picture = str((SHIPPED.parent / "images" / "geo3k_2402.png").resolve())
    assert ROWS[0] == {"id": "2402", "question": question, "images": [picture], "answer": "5", "tolerance": 0.01}


def test_every_answer_that_ships_can_be_checked_and_every_picture_opened() -> None:
    assert [task.id for task in TASKS if gold_answer(task).value != float(task.fields["answer"])] == []
    for row in ROWS:
        with Image.open(row["images"][0]) as image:
            image.load()
            assert min(image.size) >= 28
            assert max(image.size) <= 384


# --- the public layouts -------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n, and so on"
URI = "data:image/png;base64," + b64encode(PNG).decode()


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_hubs_parquet_is_read_with_its_bytes(tmp_path: Path) -> None:
    row = {"images": [{"bytes": PNG, "path": None}], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"}
    file = parquet(tmp_path / "test-00000-of-00001.parquet", [row, row | {"answer": "3"}])
    assert list(problems(str(file), tolerance=0.02)) == [
        {
            "id": f"test-00000-of-00001-{number}",
            "question": "<image>Find x.",
            "images": [URI],
            "answer": answer,
            "tolerance": 0.02,
        }
        for number, answer in ((1, "2 \\sqrt { 221 }"), (2, "3"))
    ]


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        row = {"images": [{"bytes": PNG, "path": "a.png"}], "problem": split, "answer": "1"}
        parquet(tmp_path / "data" / f"{split}-0.parquet", [row])
    assert [row["question"] for row in problems(str(tmp_path))] == ["test", "train"]
    assert [row["question"] for row in problems(str(tmp_path), split="train")] == ["train"]
    with pytest.raises(FileNotFoundError) as caught:
        list(problems(str(tmp_path), split="dev"))
    assert str(caught.value) == (
        f"no .parquet or .jsonl file whose name begins with 'dev' in {tmp_path}; it holds test-0.parquet, train-0.parquet"
    )
    with pytest.raises(FileNotFoundError, match=r"there is no .*gone"):
        list(problems(str(tmp_path / "gone")))


def test_what_trainers_make_of_it_is_read(tmp_path: Path) -> None:
    verl = {
        "prompt": [{"role": "user", "content": "<image>Find x. You FIRST think about it."}],
        "images": [{"bytes": PNG, "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
    }
    (read,) = problems(str(parquet(tmp_path / "verl.parquet", [verl])))
    assert (read["question"], read["images"], read["answer"]) == ("<image>Find x.", [URI], "3")
    slime = {"problem": "Find x.", "images": [URI], "answer": "3"}
    (read,) = problems(str(parquet(tmp_path / "slime.parquet", [slime])))
    assert (read["question"], read["images"], read["answer"]) == ("Find x.", [URI], "3")


def test_json_lines_name_pictures_beside_them(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "image": "images/a.png", "question": "q", "answer": 5, "tolerance": 0.5},
        {"images": ["/abs/b.png", "https://pictures/c.png", "file:///d.png"], "problem": "p", "answer": "6"},
    ]
    (tmp_path / "own.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert list(problems(str(tmp_path / "own.jsonl"))) == [
        {"id": "7", "question": "q", "images": [str(tmp_path / "images/a.png")], "answer": "5", "tolerance": 0.5},
        {
            "id": "own-2",
            "question": "p",
            "images": ["/abs/b.png", "https://pictures/c.png", "file:///d.png"],
            "answer": "6",
            "tolerance": 0.01,
        },
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "1", "image": "a"}, "it has no question (`question` or `problem`); its fields: answer, image"),
        ({"question": "q", "image": "a"}, "it has no `answer`; its fields: question, image"),
        ({"question": "q", "answer": "1"}, "it has no picture (`image` or `images`); its fields: question, answer"),
        (
            {"question": "q", "answer": "1", "images": [3]},
            "a picture is int; it must be bytes, a path, or a `data:` URI",
        ),
        ([], "a row must be a mapping, not list"),
    ],
)
def test_a_row_that_cannot_be_a_task_is_named(row: Any, problem: str, tmp_path: Path) -> None:
    good = {"question": "q", "answer": "1", "image": "a"}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared whole)
        list(problems(str(tmp_path / "own.jsonl")))
    assert str(caught.value) == f"own.jsonl, row 2: {problem}"


# --- asking -------------------------------------------------------------------------------------------------


def asked(question: str, *images: str) -> Task:
    return Task(id="t", index=0, fields={"question": question, "images": list(images), "answer": "1"})


def test_pictures_stand_where_the_question_says_or_in_front() -> None:
    a, b = ImagePart(image="/a"), ImagePart(image="/b")
    assert ask(asked("<image>Find x.", "/a")) == [a, TextPart(text="Find x.")]
    assert ask(asked("Find x.", "/a", "/b")) == [a, b, TextPart(text="Find x.")]
    assert ask(asked("In <image> and <image>?", "/a", "/b"), "Think.") == [
        TextPart(text="In"),
        a,
        TextPart(text="and"),
        b,
        TextPart(text="?"),
        TextPart(text="\nThink."),
    ]
    assert ask(asked("No picture.")) == [TextPart(text="No picture.")]


def test_a_question_and_its_pictures_must_fit() -> None:
    with pytest.raises(ValueError, match="task 't': 2 places for pictures in its question, and 1 pictures"):
        ask(asked("<image><image>", "/a"))
    with pytest.raises(ValueError, match="task 't' has no field 'question'"):
        ask(Task(id="t", index=0, fields={"answer": "1"}))


def test_reset_asks_and_lays_out_the_facts() -> None:
    parts = [ImagePart(image="/p/a.png"), TextPart(text="Find x."), TextPart(text="\nBox it.")]
    assert Geo3k(instruction="Box it.").reset(TASK, seed=0) == Reset(
        messages=[Message(role="user", content=parts)], facts={"solved": False, "tries": 0}
    )


def test_a_task_that_cannot_be_graded_fails_at_reset() -> None:
    with pytest.raises(
        ValueError, match="task 't': the answer 'none' is not a number; write one number in the field `answer`"
    ):
        Geo3k().reset(Task(id="t", index=0, fields={"question": "q", "images": [], "answer": "none"}), seed=0)


# --- the grader ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", ["\\boxed{\\frac{8}{15}}", "So <answer>0.53</answer>", "\\boxed{1}? \\boxed{x = 8/15}"]
)
def test_a_right_answer_satisfies(view: View, reply: str) -> None:
    assert Grader().respond(view(TASK, reply)) == UserTurn(
        satisfied=True, solved=True, rewards=RIGHT, facts={"graded": 0, "tries": 1, "solved": True}
    )


def test_a_wrong_answer_is_told_in_the_specs_words_or_its_own(view: View) -> None:
    assert Grader().respond(view(TASK, "\\boxed{ 7 }", facts={"tries": 1})) == UserTurn(
        content="7 is not right. Read the question again, check your steps, and answer again.",
        recover="wrong",
        fields={"answer": "7", "tries": 2, "question": "Find x.", "image": "/p/a.png"},
        facts={"graded": 0, "tries": 2},
    )


def test_no_answer_is_not_a_try(view: View) -> None:
    fields = {"tries": 0, "question": "Find x.", "image": "/p/a.png"}
    facts = {"graded": 0, "tries": 0}
    assert Grader().respond(view(TASK, "It is 8/15.")) == UserTurn(
        content="I cannot find your answer. End with: \\boxed{12}", recover="no_answer", fields=fields, facts=facts
    )
    assert Grader().respond(view(TASK, "\\boxed{8/15}", finish="length")) == UserTurn(
        content="Your reply was cut off. Be shorter, and end with: \\boxed{12}",
        recover="no_answer",
        fields=fields,
        facts=facts,
    )


def test_what_is_said_to_templates_is_what_is_declared(view: View) -> None:
    for user, replies in ((Grader(), ["\\boxed{7}", "?"]), (Reminder(), ["?"])):
        for reply in replies:
            turn = user.respond(view(TASK, reply))
            assert turn.recover is not None
            assert tuple(turn.fields) == user.recover_fields[turn.recover]


def test_later_answers_may_be_paid_less(view: View) -> None:
    turn = Grader(correct=2.0, retry=0.5).respond(view(TASK, "\\boxed{8/15}", facts={"tries": 2}))
    assert turn.rewards == [RewardEvent(name="correct", value=0.5, cause="right answer")]


def test_only_the_models_words_are_graded(view: View) -> None:
    messages = [
        Message(role="user", content="\\boxed{8/15}"),
        Message(role="assistant", content="Hm."),
        Message(role="tool", content="\\boxed{8/15} <answer>8/15</answer>"),
    ]
    assert not Grader().respond(view(TASK, "Hm.", messages=messages)).solved
    assert Geo3k().score(view(TASK, "Hm.", messages=messages)) == []


def test_no_word_to_the_model_gives_the_answer_away(view: View) -> None:
    for task in TASKS[:40]:
        gold = task.fields["answer"]
        turn = Grader().respond(view(task, "\\boxed{123456}"))
        told = str(turn.content) + str(turn.fields).replace(task.fields["question"], "").replace(
            turn.fields["image"], ""
        )
        assert gold not in told.replace("123456", "").replace("'tries': 1", "")


def test_score_grades_a_last_answer_that_nobody_judged(view: View) -> None:
    env = Geo3k(correct=1.0)
    assert env.score(view(TASK, "\\boxed{8/15}")) == RIGHT
    assert env.score(view(TASK, "?", "\\boxed{8/15}", facts={"graded": 0})) == RIGHT
    assert env.score(view(TASK, "\\boxed{8/15}", facts={"graded": 0})) == []
    assert env.score(view(TASK, "\\boxed{8/15}", finish="length")) == []
    assert env.score(view(TASK, "\\boxed{8/15}", malformed=[MalformedCall(raw="<", problem="open")])) == []
    assert env.score(view(TASK, "\\boxed{8}")) == []


# --- the tool -----------------------------------------------------------------------------------------------


def calling(view: View, *answers: str, **changes: Any) -> EpisodeView:
    calls = [ToolCall(id=f"call_0_{n}", name="calc_score", arguments={"answer": a}) for n, a in enumerate(answers)]
    return view(TASK, "", calls=calls, **changes)


def test_the_tool_pays_the_turn_that_is_right_and_solves_the_task(view: View) -> None:
    assert Geo3kTool().calc_score("\\boxed{8/15}", calling(view, "8/15", facts={"tries": 1})) == ToolReply(
        content="Score 1: 8/15 is right.",
        rewards=[RewardEvent(name="score", value=1.0, cause="right answer")],
        facts={"solved": True, "tries": 2},
    )


def test_the_tool_scores_a_wrong_answer_and_says_so(view: View) -> None:
    assert Geo3kTool(wrong=-0.25).calc_score("7", calling(view, "7")) == ToolReply(
        content="Score -0.25: 7 is not right. Reason in another way, and check the new answer.",
        rewards=[RewardEvent(name="score", value=-0.25, cause="wrong answer")],
        facts={"tries": 1},
    )


def test_several_answers_in_one_turn_are_not_checked(view: View) -> None:
    with pytest.raises(ValueError, match="hand in one answer a turn; none of these was checked"):
        Geo3kTool().calc_score("8/15", calling(view, "8/15", "7"))


def test_an_answer_that_cannot_be_read_costs_nothing(view: View) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared whole)
        Geo3kTool().calc_score("7 or 8/15", calling(view, "7 or 8/15"))
    assert str(caught.value) == "'7 or 8/15' is no number that can be checked; write one, such as 12, 4.5 or 2\\sqrt{3}"


def test_the_tools_face_is_not_paid_twice(view: View) -> None:
    assert Geo3kTool().score(view(TASK, "\\boxed{8/15}")) == []


def test_with_graded_answer_only_the_last_reply_is_rewarded(view: View) -> None:
    environment = Geo3kTool(graded="answer")
    assert environment.calc_score("8/15", calling(view, "8/15")) == ToolReply(
        content="8/15 is right. Give your final answer, within \\boxed{}.", facts={"tries": 1}
    )
    assert environment.calc_score("7", calling(view, "7", facts={"tries": 1})) == ToolReply(
        content="7 is not right. Reason in another way.", facts={"tries": 2}
    )
    assert environment.score(view(TASK, "\\boxed{8/15}")) == RIGHT
    assert environment.score(view(TASK, "\\boxed{7}")) == environment.score(calling(view, "8/15")) == []
    with pytest.raises(ValueError, match="graded 'reply' is not known; write calls or answer"):
        Geo3kTool(graded="reply")  # type: ignore[arg-type]


def test_the_tools_schema_asks_for_a_string_and_takes_a_number() -> None:
    from engine.spec.code.signature import shape_of

    shape = shape_of(Geo3kTool().tools()[0])
    assert shape.schema["function"] == {
        "name": "calc_score",
        "description": "Check your answer to the problem. One answer a turn.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "One number, such as 12, 4.5 or 2\\sqrt{3}."},
            },
            "required": ["answer"],
        },
    }
    assert shape.view == "view"
    assert shape.arguments.model_validate({"answer": 5}).answer == "5"


def test_the_reminder_asks_for_the_tool(view: View) -> None:
    assert Reminder().respond(view(TASK, "It is 8/15.")) == UserTurn(
        content="Call calc_score with your answer.", recover="no_answer", fields={"tries": 0, "question": "Find x."}
    )
    assert Reminder().respond(view(TASK, "It", finish="length")).content == (
        "Your reply was cut off. Call calc_score with your answer."
    )
