"""The tokens of a branch as columns of equal length: ids, texts, loss mask, log-probs, advantages, weight versions,
turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.errors import EngineError, StoreError
from engine.schemas.base import Struct
from engine.schemas.journal import GenerationRecord
from engine.schemas.model import ModelSpec
from engine.store.rows.build import RowBuilder

if TYPE_CHECKING:
    from engine.store.reader import RunReader
    from engine.store.rows.row import TrainingRow
    from engine.tokens.tokenizer import FastTokenizer


_LONGEST = 8
"""Maximum number of tokens that are decoded together: no character has more bytes than that many tokens."""
_PARTIAL = "\ufffd"
UNFINISHED = "the episode is not finished"
"""Why the episode has no advantages."""


class TokenTexts:
    """Decodes ids one by one.

    Args:
        tokenizer: The tokenizer; None if it cannot be loaded.
        problem: Why it cannot be loaded.
    """

    def __init__(self, tokenizer: FastTokenizer | None, problem: str = "") -> None:
        self._tokenizer = tokenizer
        self.problem = problem
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, int [tokens]; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids))

    def each(self, ids: Sequence[int]) -> list[str] | None:
        """Return a text for each of the ids, int [tokens]; None without a tokenizer.

        A character whose bytes are split over several tokens is the text of the first of them; the others have an empty
        text.
        """
        if self._tokenizer is None:
            return None
        texts: list[str] = []
        while len(texts) < len(ids):
            at = len(texts)
            id_, count = ids[at], 1
            if id_ not in self._pieces:
                in_range = 0 <= id_ < self._tokenizer.size
                self._pieces[id_] = self._tokenizer.piece(id_) if in_range else f"<{id_}>"
            text = self._pieces[id_]
            while _PARTIAL in text and count < _LONGEST and at + count < len(ids):
                joined = self.decode(ids[at : at + count + 1])
                count += 1
                if _PARTIAL not in joined:
                    text = joined
                    break
            else:
                count = 1  # no following token completes it
            texts += [text, *[""] * (count - 1)]
        return texts


@lru_cache(maxsize=8)
def _load(model: str, base: str) -> TokenTexts:
    from engine.tokens.loading import load_tokenizer

    try:
        return TokenTexts(load_tokenizer(ModelSpec.model_validate_json(model), Path(base)))
    except EngineError as error:
        return TokenTexts(None, str(error))
    except (OSError, ValueError) as error:
        return TokenTexts(None, f"the tokenizer cannot be loaded: {error}")


_LOADING = Lock()


def texts_of(store: RunReader) -> TokenTexts:
    """Return the texts of the tokens of a run's model. The tokenizer is loaded once; a failure is kept too."""
    try:
        model = store.header.model.model_dump_json(by_alias=True)
    except (ValueError, KeyError) as error:
        return TokenTexts(None, f"the run's `model` cannot be read: {error}")
    with _LOADING:
        return _load(model, str(store.header.base))


class Advantages(Struct, frozen=True, kw_only=True, eq=False):
    """The training rows of a group, by episode and branch."""

    method: str = ""
    """The credit method."""
    missing: str = ""
    """Why there are no advantages; empty where there are."""
    rows: dict[tuple[str, int], TrainingRow] = msgspec.field(default_factory=dict)

    @classmethod
    def of_group(cls, store: RunReader, task_id: str) -> Advantages:
        """Compute the advantages of a task's finished episodes with the credit method of the run's spec."""
        return _of_done(store, tuple(row.id for row in store.samples(task_id) if row.status == "done"))

    def of_turn(self, episode_id: str, turn: int) -> float | None:
        """Return the mean advantage of a turn's sampled tokens; None if it is not trained on."""
        for (episode, _), row in self.rows.items():
            if episode == episode_id and len(row.advantages):
                of_turn = row.advantages[row.branch.turn_ids[row.places] == turn]
                if len(of_turn):
                    mean = float(of_turn.mean(dtype="float64"))
                    return mean if math.isfinite(mean) else None
        return None


@lru_cache(maxsize=4)
def _of_done(store: RunReader, episodes: tuple[str, ...]) -> Advantages:
    """Advantages of finished episodes, which do not change any more. Methods that need a critic's values have none."""
    group = [store.trajectory(episode) for episode in episodes]
    try:
        builder = RowBuilder.of_run(store)
        rows = {(row.episode.episode_id, row.branch.index): row for row in builder.rows(group)}
    except EngineError as error:
        return Advantages(missing=str(error))
    missing = "evaluations have none" if builder.evaluation else ""
    return Advantages(method=builder.credit.method, missing=missing, rows=rows)


def token_columns(store: RunReader, episode_id: str, branch: int) -> dict[str, Any]:
    """Return the tokens of one branch of a finished episode.

    Every column has one entry per token. `advantages` and `token_rewards` are None where the row is not trainable,
    `texts` where the tokenizer cannot be loaded: `problem` says why.

    Raises:
        StoreError: the run has no such episode or branch, or the episode is not done.
    """
    trajectory = store.trajectory(episode_id)
    shown = next((candidate for candidate in trajectory.branches if candidate.index == branch), None)
    if shown is None:
        raise StoreError(f"{episode_id} has {len(trajectory.branches)} branches, and no branch {branch}")
    advantages = Advantages.of_group(store, trajectory.task_id)
    row = advantages.rows.get((episode_id, branch))
    texts = texts_of(store)
    return {
        "branch": shown.index,
        "ids": shown.input_ids,
        "texts": texts.each(shown.input_ids.tolist()),
        "problem": texts.problem,
        "mask": shown.loss_mask,
        "logprobs": shown.logprobs,
        "versions": shown.weight_versions,
        "turns": shown.turn_ids,
        "kinds": [(span.kind, span.start, span.end) for span in shown.spans],
        "advantages": None if row is None or not len(row.advantages) else row.on_tokens(row.advantages),
        "token_rewards": None if row is None else row.token_rewards(),
        "trainable": row is not None and row.trainable,
        "missing": advantages.missing,
    }


def sampled_columns(store: RunReader, episode_id: str) -> dict[str, Any]:
    """Return the sampled tokens of an episode that is not finished, from its journal: one turn after the other."""
    generations = [
        entry.record.generation for entry in store.journal(episode_id) if isinstance(entry.record, GenerationRecord)
    ]
    texts = texts_of(store)
    ids = _joined([generation.output_ids for generation in generations], np.int32)
    ends = np.cumsum([0, *(len(generation.output_ids) for generation in generations)])
    versions = np.zeros(len(ids), np.int32)
    for begin, generation in zip(ends, generations, strict=False):
        for span in generation.versions:
            versions[begin + span.start : begin + span.end] = span.version
    return {
        "branch": -1,
        "ids": ids,
        "texts": texts.each(ids.tolist()),
        "problem": texts.problem,
        "mask": np.ones(len(ids), np.int32),
        "logprobs": _joined([generation.logprobs for generation in generations], np.float32),
        "versions": versions,
        "turns": _joined(
            [np.full(len(generation.output_ids), at) for at, generation in enumerate(generations)], np.int32
        ),
        "kinds": [("generated", int(start), int(end)) for start, end in pairwise(ends)],
        "advantages": None,
        "token_rewards": None,
        "trainable": False,
        "missing": UNFINISHED,
    }


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
