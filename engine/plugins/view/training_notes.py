"""What the page of a training says beside its curves: warnings as banners, and what each metric means.

A training notes in `notes.jsonl` of its folder that it lacks a learning signal, and how it failed: nothing is computed
twice. The other warnings follow from its newest lines of metrics and from the times of its files. The meaning of a
metric, and when it is bad, is its row in the table of `metrics.md`, which is a page of the docs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from engine.errors import StoreError, TrainError
from engine.plugins.show.listing.training import Training, lines_of
from engine.runner.observers import TrainingObserver
from engine.store.json_lines import JsonLines
from engine.store.lock import is_held
from engine.store.training import METRICS

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


FILE = "notes.jsonl"
GROWTH = 20.0
"""A metric of `_SIGNS` that is so many times its median in each of the newest `NEWEST` steps diverges."""
NEWEST = 3
_EARLIER = 5
"""Steps before these that a median needs."""
_SIGNS = {"grad_norm": 0.5, "policy/approx_kl": 0.02}
"""Metrics that show that a training diverges, with the smallest median that counts."""
_SILENCE = 120.0
"""Seconds without a write after which a training can be stale."""
_STEPS = 3
"""It is stale after the time of so many steps."""
_WRITTEN = (METRICS, "batches.jsonl", "rollouts/run.db", "rollouts/run.db-wal", "train.json")


class TrainingNotes(TrainingObserver):
    """Notes what a training warns of."""

    def __init__(self, loaded: LoadedSpec, folder: Path) -> None:
        self._folder = folder

    async def lacks_signal(self, step: int, reason: str) -> None:
        """Note that several steps had no learning signal."""
        self._add("no_signal", step, reason.partition(": ")[2])

    async def failed(self, error: Exception, step: int) -> None:
        """Note the error. A folder without metrics stays as it is: the command removes it."""
        if (self._folder / METRICS).exists():
            kind = "diverged" if isinstance(error, TrainError) and error.kind == "diverged" else "failed"
            self._add(kind, step, str(error))

    def _add(self, kind: str, step: int, text: str) -> None:
        with suppress(StoreError):  # the training says it too
            JsonLines(self._folder / FILE, dict).append({"kind": kind, "step": step, "time": time.time(), "text": text})


def status_of(training: Training) -> str:
    """`running`, `done`, or `stopped` where it can be continued."""
    if is_held(training.folder):
        return "running"
    step = training.lines[-1]["step"] if training.lines else 0
    return "stopped" if training.planned is not None and step < training.planned else "done"


def banners(training: Training, now: float) -> list[dict[str, str]]:
    """Return the warnings of a training as it is now, each with `kind`, `title` and `text`.

    Args:
        now: Unix time.
    """
    status = status_of(training)
    step, written = (training.lines[-1][name] if training.lines else 0 for name in ("step", "time"))
    notes = [note for note in lines_of(training.folder / FILE) if note["step"] <= step]
    failures = [note for note in notes if note["kind"] != "no_signal" and note["time"] >= written]
    shown: list[tuple[str, str, str]] = []
    if failures and status != "running":
        title = "It diverged" if failures[-1]["kind"] == "diverged" else "It failed"
        shown.append((failures[-1]["kind"], f"{title} after step {step}", failures[-1]["text"]))
    elif status == "stopped":
        text = f"engine train --resume {training.folder.name} continues it."
        shown.append(("stopped", f"It does not run: it stopped after step {step} of {training.planned}", text))
    if status == "running" and (silence := _silence(training, now)):
        shown.append(("stale", "Stale", silence))
    if not failures and (sign := next(filter(None, (_sign(training.lines, name) for name in _SIGNS)), "")):
        shown.append(("diverged", "It diverges", f"{sign}. Lower train.optimizer.lr, or go back to a checkpoint."))
    signals = [note for note in notes if note["kind"] == "no_signal"]
    if signals and not any(  # no group since then had advantages that are not 0
        line.get("groups/equal", 0) + line.get("groups/small", 0) < line.get("groups/sampled", 0)
        for line in training.lines
        if line["step"] > signals[-1]["step"]
    ):
        title = f"No learning signal since step {signals[-1]['step'] - NEWEST + 1}"
        shown.append(("no_signal", title, signals[-1]["text"]))
    return [{"kind": kind, "title": title, "text": text} for kind, title, text in shown]


def _silence(training: Training, now: float) -> str:
    """Say for how long a running training has written nothing; empty if it is not long."""
    times = [path.stat().st_mtime for name in _WRITTEN if (path := training.folder / name).exists()]
    durations = [line["step_seconds"] for line in training.lines[-10:] if line.get("step_seconds")]
    usual = median(durations) if durations else 0.0
    silence = now - max(times)
    if silence < max(_SILENCE, _STEPS * usual):
        return ""
    of_step = f", and a step takes {usual:.0f} s" if durations else ""
    return f"Nothing was written for {silence / 60:.0f} min{of_step}. Look at its output: a server may be lost."


def _sign(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    """Say that a metric grew far beyond its median; empty if it did not."""
    values = [abs(line[name]) for line in lines if line.get(name) is not None]
    if len(values) < NEWEST + _EARLIER:
        return ""
    usual = max(median(values[:-NEWEST]), _SIGNS[name])
    if min(values[-NEWEST:]) <= GROWTH * usual:
        return ""
    return f"{name} is {values[-1]:.3g} and was {usual:.3g} or less in half of the steps before"


_ROW = re.compile(r"^\| (`.+?) \| (.+?) \|(?: (.+?))? \|$", re.MULTILINE)
_NAME = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_PART = re.compile(r"<\w+>")


@cache
def _table() -> list[tuple[re.Pattern[str], str, str]]:
    """The rows, each with a pattern of names, what they mean, and when they are bad."""
    page = (files("engine.plugins.view") / "metrics.md").read_text("utf-8")
    rows = []
    for names, meaning, bad in _ROW.findall(page):
        texts = [_LINK.sub(r"\1", text).replace("`", "") for text in (meaning, bad)]
        for name in _NAME.findall(names):
            pattern = ".+".join(map(re.escape, _PART.split(name)))
            rows.append((re.compile(pattern), texts[0], texts[1]))
    return rows


def explained(name: str) -> list[str] | None:
    """Return what a metric means and when it is bad; None if no row names it."""
    return next(([meaning, bad] for pattern, meaning, bad in _table() if pattern.fullmatch(name)), None)
