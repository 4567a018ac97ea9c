"""The order of groups: the task of each group's number, and the numbers that are consumed.

A group is identified by its number in the order of starts. `TaskOrder` gives the task and the epoch of each number, and
with them the names of its episodes in the run store, so a number is the same group in every launch of a training. A
consumed group was trained on, left out, cancelled or dropped, and never trains again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.plugin import Hook

if TYPE_CHECKING:
    from engine.runner.batch import Group
    from engine.schemas.environment import Task
    from engine.schemas.train import TrainSpec
    from engine.spec.rows.mix import Mix


class DrawFilter:
    """Which draws of tasks are skipped, from the results of earlier steps. It skips none; a plugin has a subclass.

    A skipped draw is consumed. A resumed training gives it the results of the batch log, so it must skip the same draws
    then.
    """

    most_skipped = 0
    """Most draws that are skipped one after the other; the next one is made all the same."""

    def skips(self, number: int) -> bool:
        """Whether a draw is skipped, by its number."""
        return False

    def results(self, groups: Sequence[Group]) -> dict[str, list[int]]:
        """What the batch log keeps of the groups of a step, by the number of the draw."""
        return {}

    def add(self, results: Mapping[str, Sequence[int]]) -> None:
        """Add the results of a step that is made."""

    def metrics(self, step: int, skipped: int, forced: int) -> dict[str, float]:
        """Metrics of a step. `forced`: draws that were made because `most_skipped` were skipped before them."""
        return {}


FILTER_DRAWS: Hook[Callable[[TrainSpec, TaskOrder], DrawFilter | None]] = Hook("filter_draws")
"""Makes the filter of a training's draws; None if its spec asks for none. The `TrainSpec` is the section as it is
used. The filter of the first plugin that has one is used."""


class TaskOrder:
    """The task of each group over epochs: in file order, or in a new random order in each epoch.

    The sources of a mix are drawn by their weights, and each has epochs of its own.

    >>> order = TaskOrder(tasks, shuffle=True, seed=0)
    >>> order[0], order[len(tasks)]                        # the task of any group, without reading the ones before

    Args:
        tasks: The tasks.
        shuffle: A new random order in each epoch.
        seed: Seed of the orders.
        mix: The sources, if `tasks` are mixed.

    Raises:
        TrainError: the list of tasks is empty.
    """

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int, mix: Mix | None = None) -> None:
        if not tasks:
            raise TrainError("there are no tasks to train on: check `tasks` in the spec", kind="no_data")
        self._tasks = tasks
        self.count = len(tasks)
        self._shuffle = shuffle
        self._seed = seed
        self._mix = mix
        self._orders: dict[str, tuple[int, list[int]]] = {}
        """The newest epoch of each source, and the order of its tasks in that epoch."""

    def place(self, number: int) -> tuple[int, int]:
        """The index of a group's task in the list of tasks, and its epoch."""
        if self._mix is None:
            return self._drawn(str(self._seed), len(self._tasks), number)
        source, draw = self._mix.draws[number]
        name = self._mix.names[source]
        indices = self._mix.indices[name]
        place, epoch = self._drawn(f"{self._seed}/{name}", len(indices), draw)
        return int(indices[place]), epoch

    def _drawn(self, source: str, count: int, draw: int) -> tuple[int, int]:
        """The place of a draw's task among the `count` tasks of a source, and the draw's epoch."""
        epoch, place = divmod(draw, count)
        if source not in self._orders or self._orders[source][0] != epoch:
            order = list(range(count))
            if self._shuffle:
                random.Random(f"{source}/{epoch}").shuffle(order)
            self._orders[source] = epoch, order
        return self._orders[source][1][place], epoch

    def __getitem__(self, number: int) -> Task:
        index, epoch = self.place(number)
        task = self._tasks[index]
        # A later epoch gives the task another id, so that its episodes have their own store entries and seeds.
        return task.model_copy(update={"id": f"{task.id}~{epoch}"}) if epoch else task


@dataclass(slots=True)
class ConsumedGroups:
    """A set of group numbers, kept short: all numbers below `next` belong to it, and those in `beyond`.

    >>> consumed = ConsumedGroups()
    >>> consumed.add([0, 1, 4])
    >>> (consumed.next, consumed.beyond, 4 in consumed, 3 in consumed)
    (2, {4}, True, False)
    """

    next: int = 0
    """The smallest number that is not consumed."""
    beyond: set[int] = field(default_factory=set)
    """Consumed numbers above `next`."""

    def __contains__(self, number: int) -> bool:
        return number < self.next or number in self.beyond

    def add(self, numbers: Iterable[int]) -> None:
        """Add group numbers."""
        self.beyond.update(number for number in numbers if number >= self.next)
        while self.next in self.beyond:
            self.beyond.remove(self.next)
            self.next += 1

    def copy(self) -> ConsumedGroups:
        """A copy that changes independently."""
        return ConsumedGroups(self.next, set(self.beyond))
