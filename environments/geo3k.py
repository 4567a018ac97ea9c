r"""Geometry problems with pictures (Geometry3K), in two forms: a tool that scores answers, or a grader who asks again.

`problems` makes the tasks, from the 301 problems that ship with the project or from a copy of the public data set: the
hub's `hiyouga/geometry3k` as Parquet (`images`, a list of `{bytes, path}`; `problem`, with `<image>` where the picture
stands; `answer`), the versions of verl and slime (`extra_info.question`, `reward_model.ground_truth`; images as `data:`
URIs), or JSON lines with `image` or `images`, paths relative to the file. `Geo3k` asks, and `Grader` is a user who lets
the model try again (AReaL's multi-turn workflow; the discount by turns is the spec's `rewards.credit`). `Geo3kTool`
asks too, and offers the tool `calc_score`, which scores an answer in the turn that calls it and says whether it is
right (slime's geo3k example); `Reminder` is the user after a turn without a call.

Source: Lu et al. 2021, "Inter-GPS: Interpretable Geometry Problem Solving with Formal Language and Symbolic
Reasoning", arXiv:2105.04165.

Invariants: every row has `id`, `question`, `images` (references: a path that is absolute, or a URI), `answer` and
`tolerance`; one without them is an error that names its file and number. Only the model's reply or the argument of its
call is graded, one answer per turn. The model never sees the right answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from engine.environments.math_answers import Number, final_answer, read_number, same_number
from engine.schemas.environment import EpisodeView, Reset, Task, ToolReply, UserTurn
from engine.schemas.message import ContentPart, Message, TextPart, image_part
from engine.schemas.reward import RewardEvent

SHIPPED = Path(__file__).parent / "data" / "geo3k" / "problems.jsonl"
_REFERENCES = ("sha256:", "data:", "file:", "http:", "https:")


def problems(path: str | None = None, split: str | None = None, tolerance: float = 0.01) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `images`, `answer` and `tolerance`.

    Args:
        path: A `.parquet` or `.jsonl` file, or a folder of such files (for example a copy of the hub's), relative to
            the current folder. None: the problems that ship with the project.
        split: Read only files of the folder whose names begin with this: `train`, `validation`, `test`.
        tolerance: Maximum relative error of an answer, for rows without their own: the public set rounds some of its
            answers to two decimals.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A row has no question, answer or picture.
    """
    for file in _files(SHIPPED if path is None else Path(path).expanduser(), split):
        rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
        for number, row in enumerate(rows, start=1):
            try:
                yield _task(row, file, number, tolerance)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file.name}, row {number}: {error}") from error


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {path}; name a .parquet or .jsonl file, or a folder of them")
    files = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", ".jsonl"))
    chosen = [file for file in files if split is None or file.name.startswith(split)]
    if not chosen:
        names = ", ".join(file.name for file in files) or "no such file"
        wanted = "" if split is None else f" whose name begins with {split!r}"
        raise FileNotFoundError(f"no .parquet or .jsonl file{wanted} in {path}; it holds {names}")
    return chosen


def _jsonl(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _task(row: Any, file: Path, number: int, tolerance: float) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a mapping, not {type(row).__name__}")
    extra, judged = _mapping(row.get("extra_info")), _mapping(row.get("reward_model"))
    question = _first(row.get("question"), row.get("problem"), extra.get("question"))
    answer = _first(row.get("answer"), extra.get("answer"), judged.get("ground_truth"))
    if question is None or answer is None:
        missing = "question (`question` or `problem`)" if question is None else "`answer`"
        raise ValueError(f"it has no {missing}; its fields: {', '.join(map(str, row)) or 'none'}")
    images = row.get("images", row.get("image"))
    if isinstance(images, str | bytes | Mapping):
        images = [images]
    if not isinstance(images, Sequence) or not images:
        raise ValueError(f"it has no picture (`image` or `images`); its fields: {', '.join(map(str, row))}")
    return {
        "id": str(row["id"]) if row.get("id") is not None else f"{file.stem}-{number}",
        "question": str(question),
        "images": [_reference(image, file.parent) for image in images],
        "answer": str(answer),
        "tolerance": float(row.get("tolerance", tolerance)),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None and value != ""), None)


def _reference(image: Any, folder: Path) -> str:
    """An image as a reference: bytes as a `data:` URI, a path made absolute."""
    if isinstance(image, Mapping):
        data, path = image.get("bytes"), image.get("path")
        image = data if data else path
    if isinstance(image, str):
        return image if image.startswith(_REFERENCES) else str((folder / image).resolve())
    if isinstance(image, bytes) and image:
        return image_part(image).image
    raise ValueError(f"a picture is {type(image).__name__}; it must be bytes, a path, or a `data:` URI")


MARK = "<image>"
"""The mark for a picture in a question, in the public layouts."""
EXAMPLE = "\\boxed{12}"

AnswerText = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
"""An answer: a string in the tool's schema; a number is accepted too, because models write numbers."""


def gold_answer(task: Task) -> Number:
    """The right answer of a task.

    Raises:
        ValueError: The task has no answer that is a number.
    """
    written = task.fields.get("answer")
    value = None if written is None else read_number(str(written))
    if value is None:
        raise ValueError(
            f"task {task.id!r}: the answer {written!r} is not a number; write one number in the field `answer`"
        )
    return value


def is_right(answer: Number, task: Task) -> bool:
    """Whether an answer is right within the task's `tolerance` (relative; default 0.01)."""
    return same_number(answer, gold_answer(task), float(task.fields.get("tolerance", 0.01)))


def ask(task: Task, instruction: str = "") -> list[ContentPart]:
    """The question as text and picture parts: each picture at its `<image>`, or all in front if there is no `<image>`.

    Raises:
        ValueError: The numbers of marks and pictures differ, or there is no question.
    """
    question = task.fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"task {task.id!r} has no field 'question'; `engine.environments.geo3k:problems` makes rows with all fields"
        )
    images = list(task.fields.get("images") or [])
    pieces = question.split(MARK) if MARK in question else ["" for _ in images] + [question]
    if len(pieces) != len(images) + 1:
        raise ValueError(
            f"task {task.id!r}: {len(pieces) - 1} places for pictures in its question, and {len(images)} pictures"
        )
    parts: list[ContentPart] = []
    for index, piece in enumerate(pieces):
        if piece.strip():
            parts.append(TextPart(text=piece.strip()))
        if index < len(images):
            parts.append(image_part(images[index]))
    if instruction:
        parts.append(TextPart(text=f"\n{instruction}"))
    return parts


class Geo3k:
    """Asks a task's question and shows its picture.

    Args:
        instruction: Text on its own line after the question.
        correct: Reward `correct` for a right last answer that no user has judged (see `score`).
    """

    def __init__(self, instruction: str = "", correct: float = 1.0) -> None:
        self._instruction = instruction
        self._correct = correct

    def reset(self, task: Task, seed: int) -> Reset:
        """The picture and the question. The facts `solved` and `tries` exist from the start, for guards."""
        gold_answer(task)  # a task that cannot be graded fails before any token is sampled
        message = Message(role="user", content=ask(task, self._instruction))
        return Reset(messages=[message], facts={"solved": False, "tries": 0})

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """Grade the last answer if no user judged it, for example because `limits.user_turns` was reached."""
        if view.facts.get("graded") == view.turn or view.finish != "stop" or view.calls or view.malformed:
            return []
        answer = read_number(final_answer(view.reply) or "")
        if answer is None or not is_right(answer, view.task):
            return []
        return [RewardEvent(name="correct", value=self._correct, cause="right answer")]


class Grader:
    """A user who says whether the answer is right, and lets the model try again.

    The message after a wrong answer is the spec's `recover.wrong`, and after a reply without an answer
    `recover.no_answer`; the texts here are used if the spec has none. Fields: `answer` (as it was written), `tries`
    (answers so far, this one included), `question`, and `image`, the first picture.

    Args:
        correct: Reward `correct` of the turn that gives the right answer.
        retry: Factor on `correct` for each earlier wrong answer. Keep it at 1 if the spec's credit discounts by turns.
    """

    recover_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "wrong": ("answer", "tries", "question", "image"),
        "no_answer": ("tries", "question", "image"),
    }

    def __init__(self, correct: float = 1.0, retry: float = 1.0) -> None:
        self._correct = correct
        self._retry = retry

    def respond(self, view: EpisodeView) -> UserTurn:
        """Judge the newest answer. The object keeps no state, so the same view always gives the same result."""
        tries = int(view.facts.get("tries", 0))
        answer = read_number(final_answer(view.reply) or "")
        if answer is None or view.finish == "length":
            cut = view.finish == "length"
            return UserTurn(
                content=f"{'Your reply was cut off. Be shorter, and end' if cut else 'I cannot find your answer. End'} "
                f"with: {EXAMPLE}",
                recover="no_answer",
                fields=self._fields(view.task, tries),
                facts={"graded": view.turn, "tries": tries},
            )
        facts: dict[str, Any] = {"graded": view.turn, "tries": tries + 1}
        if is_right(answer, view.task):
            value = self._correct * self._retry**tries
            reward = RewardEvent(name="correct", value=value, cause="right answer")
            return UserTurn(satisfied=True, solved=True, rewards=[reward], facts=facts | {"solved": True})
        return UserTurn(
            content=f"{answer.text} is not right. Read the question again, check your steps, and answer again.",
            recover="wrong",
            fields={"answer": answer.text} | self._fields(view.task, tries + 1),
            facts=facts,
        )

    @staticmethod
    def _fields(task: Task, tries: int) -> dict[str, Any]:
        images = list(task.fields.get("images") or [""])
        question = str(task.fields["question"]).replace(MARK, "").strip()
        return {"tries": tries, "question": question, "image": image_part(images[0]).image}


class Geo3kTool(Geo3k):
    """Asks a task's question and offers `calc_score`, which scores an answer and says whether it is right.

    A right answer sets the fact `solved`, so a machine can end the episode: `conditions: facts.solved` on `results`.

    Args:
        instruction: Text on its own line after the question.
        correct: Reward `score` of a turn that submits the right answer.
        wrong: Reward `score` of a turn that submits a wrong answer.
        graded: What is rewarded. `calls`: each turn that submits an answer. `answer`: only the last reply, if its
            \\boxed{…} is right (reward `correct`), as in slime's example; the tool then only says whether an answer is
            right, and sets no fact `solved`.
    """

    def __init__(
        self,
        instruction: str = "",
        correct: float = 1.0,
        wrong: float = 0.0,
        graded: Literal["calls", "answer"] = "calls",
    ) -> None:
        super().__init__(instruction, correct)
        if graded not in ("calls", "answer"):
            raise ValueError(f"graded {graded!r} is not known; write calls or answer")
        self._wrong = wrong
        self._answer_graded = graded == "answer"

    def tools(self) -> list[Callable[..., Any]]:
        """The tool `calc_score`."""
        return [self.calc_score]

    def calc_score(self, answer: AnswerText, view: EpisodeView) -> ToolReply:
        """Check your answer to the problem. One answer a turn.

        Args:
            answer: One number, such as 12, 4.5 or 2\\sqrt{3}.
        """
        if sum(call.name == "calc_score" for call in view.calls) > 1:
            raise ValueError("hand in one answer a turn; none of these was checked")
        number = read_number(final_answer(answer) or answer)
        if number is None:
            raise ValueError(f"{answer!r} is no number that can be checked; write one, such as 12, 4.5 or 2\\sqrt{{3}}")
        tries, right = int(view.facts.get("tries", 0)) + 1, is_right(number, view.task)
        verdict = f"{number.text} is {'right' if right else 'not right'}."
        if self._answer_graded:
            advice = "Give your final answer, within \\boxed{}." if right else "Reason in another way."
            return ToolReply(content=f"{verdict} {advice}", facts={"tries": tries})
        value = self._correct if right else self._wrong
        advice = "" if right else " Reason in another way, and check the new answer."
        return ToolReply(
            content=f"Score {value:g}: {verdict}{advice}",
            rewards=[RewardEvent(name="score", value=value, cause="right answer" if right else "wrong answer")],
            facts={"solved": True, "tries": tries} if right else {"tries": tries},
        )

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """With `graded: answer`, grade the last reply. Otherwise nothing: the tool has scored each submitted answer."""
        return super().score(view) if self._answer_graded else []


class Reminder:
    """A user who asks for an answer after a turn that submitted none.

    The message is the spec's `recover.no_answer`, if it has one. Fields: `tries` and `question`.
    """

    recover_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {"no_answer": ("tries", "question")}

    def respond(self, view: EpisodeView) -> UserTurn:
        """The reminder. It never sets `satisfied`, because only the tool knows whether an answer is right."""
        cut = "Your reply was cut off. " if view.finish == "length" else ""
        return UserTurn(
            content=f"{cut}Call calc_score with your answer.",
            recover="no_answer",
            fields={
                "tries": int(view.facts.get("tries", 0)),
                "question": str(view.task.fields["question"]).replace(MARK, "").strip(),
            },
        )
