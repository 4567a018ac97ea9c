"""The runs and trainings of a list, newest first, and the numbers that the first page shows of each.

Invariant: numbers come by SQL from the tables `episodes` and `summaries`, and a training's curve from its metrics: no
journal and no result is read.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import StoreError, TrainError
from engine.plugins.compare.run_comparison import success_of
from engine.plugins.show.listing.training import Training
from engine.plugins.view.training_notes import status_of
from engine.store.find import list_runs
from engine.store.lock import is_held
from engine.store.training import ROLLOUTS, read_header, trainings

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing
    from engine.store.header import RunHeader
    from engine.store.reader import RunReader

POINTS = 24
"""Maximum number of points of a small curve; that of a training has means of parts of equal length."""
_CURVES = ("reward/mean", "eval/reward", "loss")
"""The first of these that a training has is its small curve."""
_COUNTS = (
    "SELECT count(*), total(status = 'done'), total(status = 'running'), total(failure IS NOT NULL), total(failure IS "
    'NULL AND "limit" IS NOT NULL), total(failure IS NULL AND "limit" IS NULL AND solved), avg(CASE WHEN status = '
    "'done' THEN reward END), min(ended), max(ended), min(started) FROM episodes"
)
_CURVE = (
    f"SELECT cast((ended - :first) * {POINTS} / :span AS INTEGER) AS part, avg(reward) FROM episodes WHERE status = "
    "'done' GROUP BY part ORDER BY part"
)


def newest(out: Path, most: int) -> tuple[list[Path], int]:
    """Return the newest runs and trainings of a folder, at most so many, and the number of the others."""
    folders = sorted({*list_runs(out), *trainings(out)}, key=lambda folder: folder.stat().st_mtime, reverse=True)
    return folders[:most], len(folders[most:])


def entries(listing: Listing) -> list[dict[str, Any]]:
    """Return what is known of each run and training without a look at its episodes, newest first."""
    statuses = listing.statuses()
    shown = [
        _entry(listing.store(source.key).header, source.key, statuses[source.key])
        for source in listing.sources
        if source.training is None
    ]
    for folder in listing.trainings:
        with suppress(TrainError):  # its header is damaged
            status = "running" if is_held(folder) else "done"
            shown.append(_entry(read_header(folder), folder.name, status) | {"kind": "training"})
    return sorted(shown, key=lambda entry: entry["created"], reverse=True)


def numbers_of(listing: Listing, key: str) -> dict[str, Any]:
    """Return the numbers of a run or training.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    folder = next((folder for folder in listing.trainings if folder.name == key), None)
    if folder is None:
        return _numbers(listing.store(key))
    training = Training(folder)
    curves = training.curves()
    name = next((name for name in _CURVES if name in curves), None)
    values = [value for _, value in curves[name]] if name else []
    size = -(-len(values) // POINTS) or 1
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    own = f"{key}/{ROLLOUTS}"
    there = any(source.key == own for source in listing.sources)
    return (_numbers(listing.store(own)) if there else {}) | {
        "status": status_of(training),
        "steps": training.lines[-1]["step"] if training.lines else 0,
        "planned": training.planned,
        "curve": [sum(part) / len(part) for part in parts],
        "curve_of": name,
    }


def _entry(header: RunHeader, key: str, status: str) -> dict[str, Any]:
    return {
        "key": key,
        "kind": "evaluation" if header.evaluation else "run",
        "name": header.name,
        "spec": header.spec_path,
        "model": (header.spec.get("model") or {}).get("path", ""),
        "backend": (header.spec.get("backend") or {}).get("kind", ""),
        "status": status,
        "created": header.created,
    }


def _numbers(store: RunReader) -> dict[str, Any]:
    with store.snapshot() as connection:
        total, done, running, failed, limited, solved, reward, first, last, begun = connection.execute(
            _COUNTS
        ).fetchone()
        span = {"first": first, "span": max(last - first, 1e-9) * (1 + 1e-9)} if last is not None else None
        curve = [mean for _, mean in connection.execute(_CURVE, span)] if span else []
    ended = {"solved": solved, "ended": done - failed - limited - solved, "limit": limited, "failed": failed}
    return {
        "episodes": total,
        "done": int(done),
        "running": int(running),
        "outcomes": {name: int(count) for name, count in ended.items()},
        "reward": reward,
        "success": success_of(store),
        "cost": _cost(store),
        "seconds": last - begun if last is not None and begun is not None else None,
        "curve": curve,
        "curve_of": "mean reward by time",
    }


def _cost(store: RunReader) -> float | None:
    """The price of all turns; None where an older engine wrote no summaries."""
    try:
        return float(
            sum(
                connection.execute("SELECT total(cost) FROM summaries").fetchone()[0]
                for connection, _ in store.contents()
            )
        )
    except (sqlite3.OperationalError, StoreError):  # StoreError: a part of a divided run cannot be read
        return None
