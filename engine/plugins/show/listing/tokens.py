"""The tokens of a branch as columns of equal length: ids, texts, loss mask, log-probs, advantages, weight versions, turns."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import StoreError
from engine.plugins.show.listing.advantages import Advantages
from engine.plugins.show.listing.texts import texts_of
from engine.schemas.journal import GenerationRecord

if TYPE_CHECKING:
    from engine.schemas.trajectory import Branch
    from engine.store.reader import RunReader


def token_columns(store: RunReader, episode_id: str, branch: int) -> dict[str, Any]:
    """Return the tokens of one branch of a finished episode.

    Every column has one entry per token. `advantages` and `token_rewards` are None where the row is not trainable, `texts` where
    the tokenizer cannot be loaded: `problem` says why.

    Raises:
        StoreError: the run has no such episode or branch, or the episode is not done.
    """
    trajectory = store.trajectory(episode_id)
    found = next((candidate for candidate in trajectory.branches if candidate.index == branch), None)
    if found is None:
        raise StoreError(f"{episode_id} has {len(trajectory.branches)} branches, and no branch {branch}")
    advantages = Advantages.of_group(store, trajectory.task_id)
    row = advantages.rows.get((episode_id, branch))
    return _columns(store, found) | {
        "advantages": advantages.of_branch(episode_id, branch),
        "token_rewards": None if row is None else row.token_rewards(),
        "trainable": row is not None and row.trainable,
        "missing": advantages.missing,
    }


def _columns(store: RunReader, branch: Branch) -> dict[str, Any]:
    texts = texts_of(store)
    return {
        "branch": branch.index,
        "ids": branch.input_ids,
        "texts": texts.each(branch.input_ids.tolist()),
        "problem": texts.problem,
        "mask": branch.loss_mask,
        "logprobs": branch.logprobs,
        "versions": branch.weight_versions,
        "turns": branch.turn_ids,
        "kinds": [(span.kind, span.start, span.end) for span in branch.spans],
    }


def sampled_columns(store: RunReader, episode_id: str) -> dict[str, Any]:
    """Return the sampled tokens of an episode that is not finished, from its journal: one turn after the other."""
    generations = [
        entry.record.generation for entry in store.journal(episode_id) if isinstance(entry.record, GenerationRecord)
    ]
    texts = texts_of(store)
    ids = _joined([generation.output_ids for generation in generations], np.int32)
    versions = _joined([_versions(generation) for generation in generations], np.int32)
    turns = _joined([np.full(len(generation.output_ids), at) for at, generation in enumerate(generations)], np.int32)
    ends = np.cumsum([0, *(len(generation.output_ids) for generation in generations)])
    return {
        "branch": -1,
        "ids": ids,
        "texts": texts.each(ids.tolist()),
        "problem": texts.problem,
        "mask": np.ones(len(ids), np.int32),
        "logprobs": _joined([generation.logprobs for generation in generations], np.float32),
        "versions": versions,
        "turns": turns,
        "kinds": [("generated", int(start), int(end)) for start, end in pairwise(ends)],
        "advantages": None,
        "token_rewards": None,
        "trainable": False,
        "missing": "the episode is not finished",
    }


def _versions(generation: Any) -> np.ndarray:
    versions = np.zeros(len(generation.output_ids), np.int32)
    for span in generation.versions:
        versions[span.start : span.end] = span.version
    return versions


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
