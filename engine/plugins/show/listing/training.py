"""A training: curves of its metrics, its evaluations, and the logs that it writes.

    training = Training(find("latest"))
    training.curves()["reward/mean"]      # [(step, value), …]

The training may be running: files are read as they are now, an incomplete last line is ignored, and
nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import StoreError
from engine.plugins.show.listing.sources import is_training, open_stores
from engine.schemas.base import Struct
from engine.store.training import METRICS, read_header


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file of JSON objects; none if there is no such file."""
    try:
        data = file.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def sampled_tasks(batches: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield for each step of `batches.jsonl` the ids of the tasks that it sampled, whether it trained on them or
    not."""
    for record in lines_of(batches):
        if record.get("step_made", True):
            yield record["step"], [record["tasks"][str(group)] for group in (*record["used"], *record["left_out"])]


class EvaluationRun(Struct, frozen=True, kw_only=True):
    """One evaluation."""

    step: int
    run: str
    """The key of its store."""
    metrics: dict[str, float | None]
    """`eval/…` of its step."""
    filter: str
    """An expression that holds for exactly its episodes, for `Listing.page`."""


class Training:
    """A training's folder.

    Raises:
        StoreError: it is not the folder of a training.
    """

    def __init__(self, folder: Path) -> None:
        if not is_training(folder):
            raise StoreError(f"{folder} is not the folder of a training: it has no train.json")
        self.folder = folder
        by_step = {line["step"]: line for line in lines_of(folder / METRICS) if isinstance(line.get("step"), int)}
        self.lines: list[dict[str, Any]] = [by_step[step] for step in sorted(by_step)]
        """The lines of `metrics.jsonl`, one for each step, in order; of a step that was made again, the newest."""

    @property
    def planned(self) -> int | None:
        """Planned number of steps; None if it is given as epochs."""
        train = read_header(self.folder).spec.get("train") or {}
        return None if train.get("epochs") else train.get("steps")

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return (step, value) of each metric by its name; a step without a finite value is left out."""
        points: dict[str, list[tuple[int, float]]] = {}
        for line in self.lines:
            for name in sorted(line.keys() - {"step", "time"}):
                if line[name] is not None:
                    points.setdefault(name, []).append((line["step"], line[name]))
        return dict(sorted(points.items()))

    def evaluations(self) -> list[EvaluationRun]:
        """Its evaluations, by step."""
        metrics = {line["step"]: {name: line[name] for name in line if name.startswith("eval/")} for line in self.lines}
        try:
            sources = [source for source, _ in open_stores([self.folder])]
        except StoreError:  # there are none yet
            return []
        return [
            EvaluationRun(
                step=source.step,
                run=source.key,
                metrics=metrics.get(source.step, {}),
                filter=f'run.id == "{source.key}"',
            )
            for source in sources
            if source.step is not None
        ]
