"""Search: the model looks passages up with a tool and answers a question in `<answer>` tags.

`problems` makes the tasks. `Search` finds passages by BM25 in a file (the library bm25s, extra `search`), or by a
retriever that is reached over HTTP. The corpus that ships is about an invented archipelago, so no answer can be known
without a search.

Invariant: with a file, the same query gives the same passages in the same order (equal scores: the order of the file).
"""

from __future__ import annotations

import json
import logging
import random
import re
import string
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

DATA = Path(__file__).parent / "data" / "search"
HELD_OUT = 5
"""One question in this many is held out."""
PASSAGE_CHARACTERS = 2000
"""Maximum number of characters shown of one passage."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_WORD = re.compile(r"\w+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def problems(count: int = 48, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question` and `answers`, the same for the same arguments.

    Args:
        count: How many. A question is asked again only after all others.
        seed: Seeds their order.
        held_out: Ask the questions that are kept from training, instead of the others.
    """
    lines = (DATA / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for index, line in enumerate(lines) if (index % HELD_OUT == 0) is held_out]
    random.Random(f"search/{seed}").shuffle(rows)
    for index in range(count):
        row = rows[index % len(rows)]
        yield {**row, "id": f"{row['id']}-{index // len(rows)}"}


def surveys(count: int = 16, seed: int = 0, parts: int = 8, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question` and `answers`: several questions at once, whose answers are to be given together.

    Args:
        count: How many.
        seed: Seeds which questions come together.
        parts: Questions in one row.
        held_out: Ask the questions that are kept from training, instead of the others.
    """
    for index in range(count):
        asked = list(problems(parts, seed * 1000 + index, held_out))
        lines = [f"{number}. {row['question']}" for number, row in enumerate(asked, 1)]
        yield {
            "id": f"survey-{seed}-{index:03d}",
            "question": "\n".join(
                ["Answer all questions, in this order, with semicolons between the answers.", *lines]
            ),
            "answers": ["; ".join(row["answers"][0] for row in asked)],
        }


def readings(count: int = 16, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `answers` and `passages`: all passages of the corpus that ships, numbered, as one
    text.

    Args:
        count: How many.
        seed: Seeds the order of questions and passages.
        held_out: Ask the questions that are kept from training, instead of the others.
    """
    lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line)["text"] for line in lines]
    for row in problems(count, seed, held_out):
        random.Random(f"readings/{seed}/{row['id']}").shuffle(passages)
        yield {**row, "passages": "\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))}


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def normalised(answer: str) -> str:
    """An answer without case, punctuation, articles and extra spaces (as SQuAD's exact match compares them)."""
    plain = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


class Bm25:
    """Passages of a JSONL file with `text` and, if wanted, `title`, ranked by BM25 (Lucene's variant, k1 1.5, b 0.75).

    Raises:
        ImportError: bm25s is not installed.
        ValueError: a line is not such a passage, or there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            import bm25s
        except ImportError:
            raise ImportError("searching a file needs bm25s: pip install 'episode-engine[search]'") from None
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self.passages: list[str] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                self.passages.append("\n".join(filter(None, (row.get("title"), row["text"]))))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f'{path}:{number}: write a JSON object with a text `text`: {{"text": "…"}}') from None
        if not self.passages:
            raise ValueError(f"{path} has no passages; write one JSON object in each line")
        self._index = bm25s.BM25(backend="numpy")
        self._index.index([words_of(passage) for passage in self.passages], show_progress=False)

    def search(self, query: str, results: int) -> list[str]:
        """The best passages that share a word with the query, best first."""
        words = [word for word in words_of(query) if word in self._index.vocab_dict]
        if not words:
            return []
        scores = self._index.get_scores(words).tolist()
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:results]
        return [self.passages[index] for index in best if scores[index] > 0]


_building = threading.Lock()
"""Held while an index is built, so that episodes that begin together build it once."""


@lru_cache(maxsize=4)
def _index(path: str, changed: int) -> Bm25:
    return Bm25(Path(path))


def retrieved(
    url: str, body: dict[str, Any], passages: list[str], seconds: float, query: str, results: int
) -> list[str]:
    """The passages of a retriever that is reached over HTTP: a JSON body goes out, JSON comes back.

    Args:
        url: Where requests are posted.
        body: The body. The texts `{query}` and `{results}` in it are replaced by the query and by the number of
            passages.
        passages: Where the passages are in the answer: keys and positions, with `*` for each element.
        seconds: Deadline of the request.
        query: The query.
        results: Most passages.

    Raises:
        ValueError: the retriever cannot be reached, or answers something else.
    """
    import httpx

    try:
        with httpx.Client(timeout=seconds) as client:
            answer = client.post(url, json=_filled(body, {"{query}": query, "{results}": results}))
        answer.raise_for_status()
        texts = list(_at(answer.json(), passages))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as problem:
        raise ValueError(f"the retriever gave no passages ({type(problem).__name__}: {problem})"[:300]) from None
    return [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in texts[:results]]


def _filled(body: Any, values: dict[str, Any]) -> Any:
    if isinstance(body, dict):
        return {key: _filled(value, values) for key, value in body.items()}
    if isinstance(body, list):
        return [_filled(value, values) for value in body]
    return values.get(body, body) if isinstance(body, str) else body


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield value
    elif path[0] == "*":
        for element in value:
            yield from _at(element, path[1:])
    else:
        yield from _at(value[int(path[0])] if isinstance(value, list) else value[path[0]], path[1:])


class Search:
    """Asks a question, offers the tool `search`, and grades the answer.

    A task has `question` and `answers`, a list of texts of which each is right.

    Args:
        corpus: Path of a JSONL file with `text` and, if wanted, `title`, relative to the current folder. Left out: the
            corpus that ships.
        url: A retriever to post queries to, instead of `corpus`.
        body: The body of such a request. Left out: that of Search-R1's server.
        passages: Where the passages are in its answer. Left out: that of Search-R1's server.
        seconds: Deadline of one request.
        most: Most passages that one call may ask for.
        correct: Reward `correct` of the right answer.
        form: Reward `form` of any answer in tags.
    """

    events = ("graded",)

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        body: dict[str, Any] | None = None,
        passages: str | None = None,
        seconds: float = 10.0,
        most: int = 5,
        correct: float = 1.0,
        form: float = 0.1,
    ) -> None:
        if (corpus and url) or most < 1:
            raise ValueError(
                f"corpus is {corpus!r}, url {url!r}, most {most}; write `corpus` or `url`, and most from 1"
            )
        if (body is not None or passages is not None) and url is None:
            raise ValueError("`body` and `passages` describe the retriever at `url`; write `url` too")
        self._find: Callable[[str, int], list[str]]
        if url is not None:
            asked = {"queries": ["{query}"], "topk": "{results}", "return_scores": True} if body is None else body
            places = (passages or "result.0.*.document.contents").split(".")
            self._find = partial(retrieved, url, asked, places, seconds)
        else:
            path = Path(corpus) if corpus else DATA / "passages.jsonl"
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}; `with.corpus` is relative to the current folder")
            with _building:
                self._find = _index(str(path.resolve()), path.stat().st_mtime_ns).search
        self._most = most
        self._correct = correct
        self._form = form

    def reset(self, task: Task, seed: int) -> Reset:
        """The question, as the user's first message."""
        _answers(task)
        words = f"{task.fields['question']}\nSearch for passages, then write <answer>…</answer>."
        return Reset(messages=[Message(role="user", content=words)])

    def tools(self) -> list[Callable[..., Any]]:
        """The tool `search`."""
        return [self.search]

    def search(self, query: str, results: int = 3) -> str:
        """Search for passages.

        Args:
            query: Words that the passages contain.
            results: How many passages you want.
        """
        if not 1 <= results <= self._most:
            raise ValueError(f"results is {results}; write 1 to {self._most}")
        cut = [
            text if len(text) <= PASSAGE_CHARACTERS else text[:PASSAGE_CHARACTERS] + "…"
            for text in self._find(query, results)
        ]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(cut, 1)) or "No passage has these words."

    def step(self, view: EpisodeView) -> Step:
        """Grade the last answer in tags by exact match with one of the task's `answers`."""
        rewards = exact_answer(view, self._correct, self._form)
        return Step(event="graded", rewards=rewards, facts={"solved": any(item.name == "correct" for item in rewards)})


def exact_answer(view: EpisodeView, correct: float = 1.0, form: float = 0.1) -> list[RewardEvent]:
    """Grade the last answer in tags by exact match with one of the task's `answers`. A scorer.

    Args:
        view: The episode.
        correct: Reward `correct` of the right answer.
        form: Reward `form` of any answer in tags.
    """
    answers = _ANSWER.findall(view.reply)
    rewards = [RewardEvent(name="form", value=form, cause="an answer in tags")] if answers else []
    if answers and normalised(answers[-1]) in {normalised(answer) for answer in _answers(view.task)}:
        rewards.append(RewardEvent(name="correct", value=correct, cause="the right answer"))
    return rewards


def first_words(text: str, budget: int, view: EpisodeView, words: int = 6) -> str:
    """The first words of a text, and an ellipsis. A condenser.

    Args:
        text: The text.
        budget: Most tokens of the result; a longer one is not used.
        view: The episode.
        words: How many words.
    """
    all_words = text.split()
    return text if len(all_words) <= words else " ".join(all_words[:words]) + " …"


def _answers(task: Task) -> list[str]:
    """The right answers of a task.

    Raises:
        ValueError: The task has no answers or no question.
    """
    answers, question = task.fields.get("answers"), task.fields.get("question")
    if not isinstance(answers, list) or not answers or not isinstance(question, str):
        raise ValueError(
            f"task {task.id!r} needs a text `question` and a list `answers`; see `engine.environments.search:problems`"
        )
    return [str(answer) for answer in answers]
