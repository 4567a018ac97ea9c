"""A training: curves of its metrics, the groups of each step, its evaluations.

    training = Training(find("latest"))
    training.curves(["reward/mean"]).series["reward/mean"]      # one value for each of .steps
    training.step(12).groups                                    # tasks that step 12 sampled
    listing.page(training.step(12).filter)                      # their episodes

The training may be running: files are read as they are now, an incomplete last line is ignored, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import StoreError
from engine.plugins.show.listing.logs import lines_of
from engine.plugins.show.listing.sources import Source, is_training, open_stores
from engine.schemas.base import Struct
from engine.store.header import RunHeader
from engine.store.training import BATCHES, METRICS, read_header

_OF_A_LINE = frozenset({"step", "time"})


class Curves(Struct, frozen=True, kw_only=True):
    """Metrics by step."""

    steps: list[int]
    """The steps that were made, in order."""
    times: list[float]
    """Unix time at the end of each step."""
    series: dict[str, list[float | None]]
    """By name: a value for each of `steps`; None where there is none or it was not finite."""


class Group(Struct, frozen=True, kw_only=True):
    """The episodes of one task in a step."""

    number: int
    """In the order of starts."""
    task: str
    """Id of the task in the store of the training; a later epoch adds `~<epoch>`."""
    use: str
    """`used`: trained on; `left_out`: sampled, without a signal; `dropped`: cancelled or too old."""


class TrainingStep(Struct, frozen=True, kw_only=True):
    """One step."""

    step: int
    version: int | None
    """Version of the weights after it; None if the batch log does not have the step."""
    groups: list[Group]
    metrics: dict[str, float | None]
    run: str
    """The key of the store that has its episodes."""
    filter: str
    """An expression that holds for exactly its episodes, for `Listing.page`."""


class EvaluationRun(Struct, frozen=True, kw_only=True):
    """One evaluation."""

    step: int
    run: str
    """The key of its store."""
    metrics: dict[str, float | None]
    """`eval/…` of its step."""
    filter: str
    """An expression that holds for exactly its episodes."""


class Overview(Struct, frozen=True, kw_only=True):
    """What a training is, and how far it is."""

    folder: str
    name: str
    created: float
    kind: str
    """`rl` or `sft`."""
    planned: int | None
    """Planned number of steps; None if it is given as epochs."""
    done: int
    """Number of the newest step."""
    metrics: list[str]
    """Names of all metrics."""
    sources: list[Source]
    """Its stores: its episodes, then its evaluations."""


class Training:
    """A training's folder.

    Raises:
        StoreError: it is not the folder of a training.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not is_training(self.folder):
            raise StoreError(f"{self.folder} is not the folder of a training: it has no train.json")

    def header(self) -> RunHeader:
        """The spec and the versions that it began with."""
        return read_header(self.folder)

    def sources(self) -> list[Source]:
        """Its stores; empty while there are none."""
        try:
            return [source for source, _ in open_stores([self.folder])]
        except StoreError:
            return []

    def overview(self) -> Overview:
        """What it is, and how far it is."""
        header = self.header()
        train = header.spec.get("train") or {}
        lines = list(self._metrics())
        return Overview(
            folder=str(self.folder),
            name=header.name,
            created=header.created,
            kind=train.get("kind", "rl"),
            planned=None if train.get("epochs") else train.get("steps"),
            done=max((line["step"] for line in lines), default=0),
            metrics=sorted({name for line in lines for name in line} - _OF_A_LINE),
            sources=self.sources(),
        )

    def curves(self, names: Iterable[str] | None = None) -> Curves:
        """Return metrics by step: those with the given names, or all."""
        lines = list(self._metrics())
        wanted = sorted({name for line in lines for name in line} - _OF_A_LINE) if names is None else list(names)
        return Curves(
            steps=[line["step"] for line in lines],
            times=[line.get("time", 0.0) for line in lines],
            series={name: [line.get(name) for line in lines] for name in wanted},
        )

    def step(self, number: int) -> TrainingStep:
        """Return one step.

        Raises:
            StoreError: neither the metrics nor the batch log have it.
        """
        metrics = next((line for line in self._metrics() if line["step"] == number), None)
        records = [line for line in lines_of(self.folder / BATCHES) if line.get("step") == number]
        if metrics is None and not records:
            raise StoreError(f"{self.folder.name} has no step {number}; its newest is {self.overview().done}")
        groups = [
            Group(number=group, task=record["tasks"][str(group)], use=use)
            for record in records
            for use in ("used", "left_out", "dropped")
            for group in record[use]
        ]
        made = [record["version"] for record in records if record.get("step_made", True)]
        run = f"{self.folder.name}/rollouts"
        return TrainingStep(
            step=number,
            version=made[-1] if made else None,
            groups=groups,
            metrics={name: value for name, value in (metrics or {}).items() if name not in _OF_A_LINE},
            run=run,
            filter=f"run.step == {number} && !run.evaluation",
        )

    def evaluations(self) -> list[EvaluationRun]:
        """Its evaluations, by step."""
        by_step = {line["step"]: line for line in self._metrics()}
        return [
            EvaluationRun(
                step=source.step,
                run=source.key,
                metrics={
                    name: value for name, value in by_step.get(source.step, {}).items() if name.startswith("eval/")
                },
                filter=f'run.id == "{source.key}"',
            )
            for source in self.sources()
            if source.step is not None
        ]

    def _metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one for each step, in order; of a step that was made again, the newest."""
        by_step = {line["step"]: line for line in lines_of(self.folder / METRICS) if isinstance(line.get("step"), int)}
        return iter(by_step[step] for step in sorted(by_step))
