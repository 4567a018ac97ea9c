"""Tasks of several sources, mixed by weight (`tasks.source: mix`).

    tasks = mixed_tasks({"easy": easy, "hard": hard}, weights=[2.0, 1.0], seed=None, limit=None)
    [task.id for task in tasks]                 # easy:0, hard:0, easy:1, easy:2, hard:1, ...
    draws = Draws([2.0, 1.0], seed=None)        # endless, for a training: draws[n] is (source, number of its draw)

The k-th draw of a source with weight w has the time (k + phase) / w; draws are taken in the order of their times. Each
beginning of the order has the shares of the weights, to within one draw of each source. The phase is 1/2; with a seed,
it is a number in [0, 1) that depends on the seed and the source's number alone.

Invariants:
- The order depends on weights, seed and the sizes of the sources alone, and is the same in every launch.
- No row is held in memory: a table reads a task when it is asked for, and iterating reads each source as a stream.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import overload

import numpy as np

from engine.schemas.base import Struct
from engine.schemas.environment import Task

DRAWS = 4096
"""About the number of draws that are computed at once."""


class Mix(Struct, frozen=True, kw_only=True):
    """What a training needs to draw tasks from the sources of a mix."""

    names: list[str]
    indices: dict[str, np.ndarray]
    """Indices of the tasks of each source in the mixed list, int64 [tasks]."""
    draws: Draws


class TaskList(Sequence[Task]):
    """The tasks of a spec, in the order in which they run. Rows are read when they are asked for."""

    @property
    def mix(self) -> Mix | None:
        """The sources, if the tasks are mixed."""
        return None

    @abstractmethod
    def chosen(self, places: np.ndarray) -> TaskList:
        """Some of the tasks. places: their indices here, ascending, int64 [tasks]."""

    @abstractmethod
    def _at(self, index: int) -> Task:
        """The task at an index, from 0."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        count = len(self)
        if isinstance(index, slice):
            return [self._at(at) for at in range(*index.indices(count))]
        if not -count <= index < count:
            raise IndexError(f"task {index} of {count}")
        return self._at(index % count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # compared by what it holds


class MixedTable(TaskList):
    """Tasks of several sources: of task i, `sources[i]` is its source, `places[i]` its index there, ascending for each
    source, and `positions[i]` its index in the whole mix. `seed` is of the phases; None: 1/2.
    """

    def __init__(
        self,
        tables: Mapping[str, TaskList],
        weights: Sequence[float],
        seed: int | None,
        sources: np.ndarray,
        places: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        self.names = list(tables)
        self.weights = list(weights)
        self.seed = seed
        self._tables = list(tables.values())
        self._sources = sources
        self._places = places
        self._positions = positions

    def __len__(self) -> int:
        return len(self._sources)

    def _at(self, index: int) -> Task:
        return self._named(index, self._tables[self._sources[index]][int(self._places[index])])

    def __iter__(self) -> Iterator[Task]:
        streams = [enumerate(table) for table in self._tables]
        for index, (source, place) in enumerate(zip(self._sources.tolist(), self._places.tolist(), strict=True)):
            yield self._named(index, next(task for at, task in streams[source] if at == place))

    def _named(self, index: int, task: Task) -> Task:
        """A task of a source, with the source's name in its id."""
        name = self.names[self._sources[index]]
        return task.model_copy(update={"id": f"{name}:{task.id}", "index": int(self._positions[index])})

    def chosen(self, places: np.ndarray) -> MixedTable:
        chosen = (column[places] for column in (self._sources, self._places, self._positions))
        return MixedTable(dict(zip(self.names, self._tables, strict=True)), self.weights, self.seed, *chosen)

    @property
    def mix(self) -> Mix:
        """The sources that have tasks."""
        by_source = {name: np.flatnonzero(self._sources == number) for number, name in enumerate(self.names)}
        indices = {name: indices_there for name, indices_there in by_source.items() if len(indices_there)}
        weights = [weight for name, weight in zip(self.names, self.weights, strict=True) if name in indices]
        return Mix(names=list(indices), indices=indices, draws=Draws(weights, self.seed))


def mixed_tasks(
    tables: Mapping[str, TaskList], weights: Sequence[float], *, seed: int | None, limit: int | None
) -> MixedTable:
    """Each task of each source once, in the order of the weights [sources]; only the first `limit`. When a source has
    no more tasks, the others go on.
    """
    counts = [len(table) for table in tables.values()]
    times = [
        (np.arange(count) + phase(seed, number)) / weight
        for number, (count, weight) in enumerate(zip(counts, weights, strict=True))
    ]
    order = np.argsort(np.concatenate(times), kind="stable")[:limit]
    sources = np.repeat(np.arange(len(counts), dtype=np.int16), counts)[order]
    places = np.concatenate([np.arange(count) for count in counts])[order]
    return MixedTable(tables, weights, seed, sources, places, np.arange(len(order)))


def phase(seed: int | None, source: int) -> float:
    """The phase of a source, by its number from 0: in [0, 1)."""
    if seed is None:
        return 0.5
    digest = blake2b(f"tasks.mix/{seed}/{source}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Draws:
    """An endless order of draws from sources of these weights [sources], in which any draw is found without the ones
    before."""

    def __init__(self, weights: Sequence[float], seed: int | None) -> None:
        self._weights = list(weights)
        self._phases = [phase(seed, number) for number in range(len(weights))]
        self._span = DRAWS / math.fsum(weights)
        """Time of one block of draws."""
        self._block = -1
        self._order: list[tuple[int, int]] = []

    def __getitem__(self, number: int) -> tuple[int, int]:
        """The source of a draw, and the number of the draw among those of its source, from 0."""
        block = max(0, number // DRAWS - 1)
        while (first := self._before(block + 1)) <= number:
            block += 1
        first = self._before(block)
        if block != self._block:
            draws = [
                ((draw + self._phases[source]) / weight, source, draw)
                for source, weight in enumerate(self._weights)
                for draw in range(self._start(source, block), self._start(source, block + 1))
            ]
            self._block, self._order = block, [(source, draw) for _, source, draw in sorted(draws)]
        return self._order[number - first]

    def _start(self, source: int, block: int) -> int:
        """Number of draws of a source before a block."""
        return max(0, math.ceil(block * self._span * self._weights[source] - self._phases[source]))

    def _before(self, block: int) -> int:
        return sum(self._start(source, block) for source in range(len(self._weights)))
