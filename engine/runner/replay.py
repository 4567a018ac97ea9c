"""Replay: rebuild finished episodes from their journals, and compare them with the stored ones, byte for byte.

No model, environment, tool or user is called: the journal's records are applied to the machine. Each difference is
reported exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.actions.action import EpisodeObjects
from engine.actions.calling.workers import Workers
from engine.actions.objects import ObjectBuilder
from engine.episode.compiled import compile_spec
from engine.errors import EngineError, ReplayError, StoreError
from engine.runner.guarded import as_judged
from engine.schemas.base import Struct
from engine.schemas.trajectory import Failure
from engine.storable import valid_text, words_of
from engine.store.images import stored_images
from engine.store.reading import never_built
from engine.store.reviews import review_facts
from engine.store.scores import EpisodeScore

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.environment import Task
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader
    from engine.tokens.template import ChatTemplate


class Replayed(msgspec.Struct, frozen=True):
    """The result of replaying one episode."""

    episode_id: str
    tokens: int
    """Number of tokens of all its branches."""
    difference: str | None
    """The first difference from the stored episode; None if there is none."""


class Replayer:
    """Rebuilds the episodes of one run."""

    def __init__(self, loaded: LoadedSpec, format: ChatTemplate, store: RunReader) -> None:
        spec = loaded.spec
        self._store = store
        self._review_facts = review_facts(store.folder)
        if format.vision is not None:
            format.vision.bank.read_from(stored_images(store))
        self._exact = spec.backend.exact_ids
        self._workers = Workers(4)
        self._compiled = compile_spec(loaded, format, self._workers)
        self._object_builder = ObjectBuilder(loaded, self._compiled.machine, self._workers)
        self._offers_tools = self._object_builder.shared_toolbox is None

    async def rebuild(self, task: Task, sample: int, journal: list[JournalEntry], upto: int | None = None) -> Episode:
        """Apply a journal to a new episode.

        Args:
            task: The episode's task.
            sample: Its index in the group.
            journal: Its entries, from the first.
            upto: Apply only this number of entries.

        Raises:
            ReplayError: an entry leads to another event or state than the journal says.
        """
        # The tools that an environment offers are part of the prompt, so its object is needed.
        if never_built(journal):
            objects = EpisodeObjects()
        elif self._offers_tools:
            objects = await self._object_builder.open(task)
        else:
            objects = EpisodeObjects(toolbox=self._object_builder.shared_toolbox)
        try:
            episode = self._compiled.episode(task, sample, objects.toolbox.schemas if objects.toolbox else [])
            for entry in journal[:upto]:
                episode.follow(entry)
            return episode
        finally:
            await self._object_builder.close(objects)

    async def rescore(self, stored: Trajectory, task: Task) -> EpisodeScore:
        """Apply a finished episode's journal with this spec's reward rules, and return the score.

        Tokens and messages do not change, because they do not depend on rewards. If the rules cannot be applied, or
        would have led to another event than the journal says, the score has a failure and no rewards.
        """
        try:
            journal = self._store.journal(stored.episode_id)
            episode = await self.rebuild(task, stored.sample_index, journal, 0)
            episode.facts.update(self._review_facts(stored.episode_id))
            for entry in journal:
                try:
                    episode.follow(entry)
                except ReplayError as error:
                    elsewhere = Failure(
                        kind="other_path", blame="spec", message=str(error), state=entry.state, turn=episode.turn
                    )
                    return _unscored(stored, episode.failure or elsewhere)
            if episode.failure is not None and episode.failure != stored.outcome.failure:
                return _unscored(stored, episode.failure)
            again = as_judged(episode.trajectory(stored.run_id, exact=self._exact), stored)
        except StoreError:  # the journal cannot be read, which says nothing about the rules
            raise
        except EngineError as error:
            return _unscored(stored, Failure(kind=error.kind, blame=error.blame, message=valid_text(str(error))))
        outcome = again.outcome
        if (
            stored.outcome.failure is None and not stored.outcome.trainable
        ):  # rows of another framework, without log-probs
            outcome = replace(outcome, trainable=False)
        return EpisodeScore(
            outcome=outcome,
            rewards=[turn.rewards for turn in again.turns],
            state_keys=[turn.state_key for turn in again.turns],
            postings=again.postings,
        )

    async def check(self, stored: Trajectory, task: Task) -> Replayed:
        """Replay one finished episode and compare."""
        tokens = sum(len(branch.input_ids) for branch in stored.branches)
        try:
            episode = await self.rebuild(task, stored.sample_index, self._store.journal(stored.episode_id))
            again = as_judged(episode.trajectory(stored.run_id, exact=self._exact), stored)
        except EngineError as error:
            return Replayed(stored.episode_id, tokens, f"{words_of(error)}")
        return Replayed(stored.episode_id, tokens, first_difference(again, stored))

    def close(self) -> None:
        """Stop the threads."""
        self._workers.close()


def _unscored(stored: Trajectory, failure: Failure) -> EpisodeScore:
    """Return a score without rewards, with the failure that says why."""
    outcome = replace(stored.outcome, failure=failure, trainable=False, reward=0.0, rewards={})
    return EpisodeScore(outcome=outcome, rewards=[{} for _ in stored.turns], state_keys=[None for _ in stored.turns])


def _pairs(left: Any, right: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, Struct) and type(left) is type(right):
        for field in fields(left):
            name = field.name
            yield from _pairs(getattr(left, name), getattr(right, name), f"{path}.{name}" if path else name)
    elif isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from _pairs(left[key], right[key], f"{path}.{key}" if path else str(key))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _pairs(a, b, f"{path}[{index}]")
    else:
        yield path, left, right


def first_difference(left: Trajectory, right: Trajectory) -> str | None:
    """Describe the first difference of two trajectories; None if they are the same, with arrays equal to the bit."""
    for path, a, b in _pairs(left, right, ""):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            if a.dtype == b.dtype and a.tobytes() == b.tobytes():
                continue
            if a.shape != b.shape:
                return f"{path}: {len(a)} entries now, {len(b)} stored"
            at = int(np.flatnonzero([one.tobytes() != other.tobytes() for one, other in zip(a, b, strict=True)])[0])
            return f"{path}[{at}]: {a[at]} now, {b[at]} stored"
        if a != b:
            return f"{path}: {a!r} now, {b!r} stored"
    return None
