"""The stores that a view shows: runs, and the stores of trainings (their episodes and their evaluations)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from engine.errors import StoreError, TrainError
from engine.schemas.base import Struct
from engine.store.database import FILE as RUN_FILE
from engine.store.find import find_run, is_file, list_runs
from engine.store.reader import RunReader
from engine.store.store import RunStore
from engine.store.training import ROLLOUTS, find_training, read_header, trainings

EVALUATIONS = "evals"
_STEP = re.compile(r"^step-(\d+)")


class Source(Struct, frozen=True, kw_only=True):
    """One run store of a view."""

    key: str
    """Its name in the view: the run's id; for a training `<training>/rollouts`, `<training>/evals/step-000010`. Unique
    in a view."""
    folder: str
    """The folder of the store."""
    name: str
    """Name of the spec."""
    created: float
    """Unix time."""
    status: str
    """`running`, `stopped`, `interrupted` or `done`."""
    evaluation: bool
    training: str | None = None
    """Folder of the training that the store belongs to."""
    step: int | None = None
    """For an evaluation of a training: the step whose weights it measured."""


def is_training(path: Path) -> bool:
    """Whether a folder is that of a training."""
    return is_file(path / "train.json")


def find(word: str | Path, out: Path | str = "runs") -> Path:
    """Return the folder of a run or of a training.

    Args:
        word: A folder, an id, the beginning of an id, or `latest`: the newest run or training.
        out: The folder in which they are stored.

    Raises:
        StoreError: nothing matches, or several do.
    """
    folder = Path(word)
    for place in (folder, Path(out) / folder):  # the second: TRAINING/evals/step-000010
        if is_training(place) or (place is not folder and len(folder.parts) > 1 and is_file(place / RUN_FILE)):
            return place
    there = trainings(Path(out))
    if str(word) == "latest":
        dated: list[tuple[float, Path]] = []
        for folder in filter(stores_of, there):
            with suppress(TrainError):  # its header is damaged
                dated.append((read_header(folder).created, folder))
        if list_runs(out) or not dated:
            run = find_run("latest", out)
            with RunStore.open(run, readonly=True) as store:
                dated.append((store.header.created, run))
        return max(dated)[1]
    try:
        return find_run(word, out)
    except StoreError as error:
        try:
            return find_training(str(word), Path(out))
        except TrainError:
            if any(training.name.startswith(str(word)) for training in there):
                raise StoreError(f"`{word}` is the beginning of several trainings in {out}; give more of it") from None
            raise error from None


def episodes_of(folder: Path) -> Path:
    """The store of a run, or of a training's own episodes.

    Raises:
        StoreError: the training has no episodes.
    """
    if not is_training(folder):
        return folder
    if not (folder / ROLLOUTS / RUN_FILE).is_file():
        raise StoreError(f"{folder} has no episodes: a training of kind `sft` samples none, and a new one has none yet")
    return folder / ROLLOUTS


def stores_of(training: Path) -> list[Path]:
    """The stores of a training: its episodes, then its evaluations by step."""
    return [
        folder
        for folder in [training / ROLLOUTS, *sorted((training / EVALUATIONS).glob("*"))]
        if (folder / RUN_FILE).is_file()
    ]


def open_stores(paths: Iterable[Path | str], known: Collection[Source] = ()) -> list[tuple[Source, RunReader]]:
    """Open the stores of runs and trainings, read-only.

    Args:
        paths: Folders of runs and trainings, from `find`.
        known: Stores that are open already; they are left out.

    Raises:
        StoreError: one cannot be read, or there are none.
    """
    keys = {source.key for source in known}
    folders = {source.folder for source in known}
    opened: list[tuple[Source, RunReader]] = []
    absolute = [Path(path).absolute() for path in paths]
    for path in absolute:
        above = (path.parent, path.parent.parent)
        of = (folder for folder in above if is_training(folder) and path in stores_of(folder))
        training = path if is_training(path) else next(of, None)
        for folder in stores_of(path) if is_training(path) else [path]:
            if str(folder) in folders:
                continue
            store = RunStore.open(folder, readonly=True)
            key = store.run_id if training is None else f"{training.name}/{folder.relative_to(training)}"
            key = str(folder) if key in keys else key
            keys.add(key)
            folders.add(str(folder))
            step = _STEP.match(folder.name) if training is not None else None
            source = Source(
                key=key,
                folder=str(folder),
                name=store.header.name,
                created=store.header.created,
                status=store.status,
                evaluation=store.header.evaluation,
                training=None if training is None else str(training),
                step=int(step[1]) if step else None,
            )
            opened.append((source, store))
    if not opened and not known:
        raise StoreError(f"there are no episodes in {', '.join(map(str, absolute)) or 'nothing'} yet")
    return opened
