"""Data sets of reasoning-gym: tasks from its generators by seed, and several attempts at each.

    tasks: {source: python, use: "engine.plugins.adapters.reasoning_gym:problems", id: id,
            with: {datasets: [leg_counting, {name: countdown, config: {min_numbers: 3}}], size: 500, seed: 1}}
    prompt: [{role: user, content: "{{question}}"}]
    environment: {adapter: reasoning_gym, use: rows, with: {attempts: 3}}
    machine: step

A row holds its item (`question`, `answer`, `metadata`) and what makes it again (`dataset`, `config`, `seed`, `size`,
`index`). The library's scorer grades each reply against the item. Where the row has no metadata, the item is made
again, and must have the row's question. The items of a few data sets change with PYTHONHASHSEED (`word_ladder`, for
example). The library has one attempt per item. Here a wrong answer may be followed by others, and a turn earns what its
answer improves on the best score before it, so the rewards of an episode sum to its best score.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from engine.errors import AdapterError
from engine.plugins.adapters.base import library, reward_of, stepped
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message

NAME = "reasoning_gym"
ROWS = "rows"
"""`use` where each row names its data set."""


def load(use: str, modules: Sequence[str] = (), **_: Any) -> None:
    """Import the library, and the modules that register data sets. The arguments are those of
    `ReasoningGymEnvironment`."""
    library(NAME, "reasoning_gym")
    for module in modules:
        library(NAME, module)


def problems(
    datasets: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    size: int = 500,
    seed: int = 0,
    modules: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Rows for `tasks`, in turns from each data set.

    Args:
        datasets: One data set or several: a name, or `{name, config, seed, size}`.
        size: How many items each makes, where it does not say it.
        seed: Of the generator, where the data set does not say it.
        modules: Modules to import first, because they register data sets.

    Yields:
        `{id, dataset, config, seed, size, index, question, answer}`, and `metadata` as a Python literal,
        if it can be written as one.

    Raises:
        AdapterError: there is no such data set, it refuses its config, or reasoning-gym is not installed.
    """
    for module in modules:
        library(NAME, module)
    listed = [datasets] if isinstance(datasets, str | Mapping) else list(datasets)
    sources = [_source(item, size, seed) for item in listed]
    for index in range(max((source["size"] for source in sources), default=0)):
        for source in sources:
            if index < source["size"]:
                item = _item(source, index)
                id = f"{source['dataset']}-{source['seed']}-{index}"
                yield {"id": id, **source, "index": index, **_kept(item)}


def _kept(item: Mapping[str, Any]) -> dict[str, Any]:
    """What a row holds of an item. The metadata is a Python literal, because it has tuples and keys that JSON does not
    keep."""
    row = {"question": item["question"], "answer": item.get("answer")}
    literal = repr(item.get("metadata"))
    try:
        return {**row, "metadata": literal} if literal_eval(literal) == item.get("metadata") else row
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return row  # the item is made again


def _source(item: str | Mapping[str, Any], size: int, seed: int) -> dict[str, Any]:
    named: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else {}
    if named.keys() - {"name", "config", "seed", "size"} or not isinstance(named.get("name"), str):
        raise AdapterError(f"a data set is a name or {{name, config, seed, size}}, not {item!r:.120}")
    return {
        "dataset": named["name"],
        "config": dict(named.get("config") or {}),
        "seed": int(named.get("seed", seed)),
        "size": int(named.get("size", size)),
    }


@lru_cache(maxsize=64)
def _dataset(name: str, config: bytes, seed: int, size: int) -> Any:
    """A data set of the library; made once in each process, because some take seconds."""
    gym = library(NAME, "reasoning_gym")
    datasets = library(NAME, "reasoning_gym.factory").DATASETS
    if name not in datasets:
        raise AdapterError(f"reasoning-gym has no data set `{name}`; it has {', '.join(sorted(datasets))}")
    try:
        return gym.create_dataset(name, **orjson.loads(config), seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        raise AdapterError(f"the data set `{name}` refuses its config: {error}") from error


def _data(source: Mapping[str, Any]) -> Any:
    config = orjson.dumps(source["config"], option=orjson.OPT_SORT_KEYS)
    return _dataset(source["dataset"], config, source["seed"], source["size"])


def _item(source: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One item of a data set: `question`, `answer` and `metadata`."""
    item = _data(source)[index]
    if not isinstance(item, dict) or not isinstance(item.get("question"), str):
        raise AdapterError(f"item {index} of the data set `{source['dataset']}` has no question, but is {item!r:.120}")
    return item


class ReasoningGymEnvironment:
    """One item of a data set, and the attempts at it. All state is in the facts, so a resume asks nothing again.

    Args:
        use: The data set's name; `rows`: each row names its own in the field `dataset`.
        base: Not used.
        config: Of the data set, where the row has none.
        seed: Of the generator, where the row has none.
        size: Of the data set, where the row has none. Items of some data sets depend on it.
        attempts: The most replies.
        enough: An answer with at least this score ends the episode.
        tag: The answer stands between `<tag>` and `</tag>`, the last such pair; empty: the whole reply is the answer.
        wrong: Said after a wrong answer; `{score}` and `{left}` are filled in.
        missing: Said after a reply without the tags; `{tag}` and `{left}` are filled in.
        modules: Modules to import first, because they register data sets.

    Raises:
        ValueError: `attempts` is less than 1.
    """

    events = ("continue", "done", "truncated")

    def __init__(
        self,
        use: str,
        base: str = ".",
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int = 500,
        attempts: int = 1,
        enough: float = 1.0,
        tag: str = "answer",
        wrong: str = "That is not right. Try again; attempts left: {left}.",
        missing: str = "Write your answer between <{tag}> and </{tag}>. Attempts left: {left}.",
        modules: Sequence[str] = (),
    ) -> None:
        if attempts < 1:
            raise ValueError(f"`attempts` must be at least 1, not {attempts}")
        for module in modules:
            library(NAME, module)
        self._source = {"dataset": use, "config": dict(config or {}), "seed": seed, "size": size}
        self._attempts, self._enough, self._tag = attempts, enough, tag
        self._wrong, self._missing = wrong, missing

    def reset(self, task: Task, seed: int) -> Reset:
        """Make the item. The spec's prompt shows its `question`; a row without one is shown it here.

        Raises:
            AdapterError: there is no such data set or item, or the item is another than the row's.
        """
        item = self._made(task)
        said = [] if "question" in task.fields else [Message(role="user", content=item["question"])]
        return Reset(messages=said, facts={"score": 0.0, "best_score": 0.0, "attempts": 0})

    def step(self, view: EpisodeView) -> Step:
        """Grade the newest reply with the library's scorer.

        Raises:
            AdapterError: the score is no number.
        """
        source, item = self._source_of(view.task), self._made(view.task)
        answer = library(NAME, "reasoning_gym.utils").extract_answer(view.reply, self._tag) if self._tag else view.reply
        facts: dict[str, Any] = {"answer": answer}
        try:
            scored = _data(source).score_answer(answer, item)
        except Exception as error:  # noqa: BLE001  (some scorers raise on text that they cannot read: it is no answer)
            scored, facts["scorer_raised"] = 0.0, f"{type(error).__name__}: {error}"[:200]
        score = reward_of(scored, f"the scorer of `{source['dataset']}`")
        attempts = view.facts["attempts"] + 1
        best = max(score, view.facts["best_score"])
        solved = score >= self._enough
        facts |= {"score": score, "best_score": best, "attempts": attempts, "solved": solved}
        words = self._missing if answer is None else self._wrong
        left = self._attempts - attempts
        return stepped(
            messages=[Message(role="user", content=words.format(score=score, left=left, tag=self._tag))],
            reward=best - view.facts["best_score"],
            cause=f"score {score:g} by `{source['dataset']}`",
            over=solved or left <= 0,
            facts=facts,
        )

    def _source_of(self, task: Task) -> dict[str, Any]:
        source = {key: task.fields.get(key, value) for key, value in self._source.items()}
        if source["dataset"] == ROWS:
            raise AdapterError("`use: rows` needs rows with the field `dataset`, as `problems` makes them")
        return source

    def _made(self, task: Task) -> dict[str, Any]:
        row = task.fields
        if isinstance(row.get("metadata"), str) and {"question", "answer"} <= row.keys():
            return {**{key: row[key] for key in ("question", "answer")}, "metadata": literal_eval(row["metadata"])}
        source = self._source_of(task)
        item = _item(source, task.fields.get("index", task.index))
        if task.fields.get("question", item["question"]) != item["question"]:
            raise AdapterError(
                f"the row of task `{task.id}` and the data set `{source['dataset']}` have different questions: they "
                "were made with another seed, size, config or version of reasoning-gym, or with another PYTHONHASHSEED"
            )
        return item
