"""The folder of a training and its files.

<name>-train-<time>/
    train.json          the loaded spec, overrides, versions of packages
    metrics.jsonl       one line per step
    checkpoints/        see `checkpoint.py`
    batches.jsonl       the groups of each step, see `batch_log.py`
    rollouts/           the run store of its episodes, which all launches share (`kind: rl`)
    data.json           the rows that it was begun with (`kind: sft`)
    model/              with `kind: sft` and LoRA: the trained model, the adapter merged in
    evals/step-000010/  the run store of an evaluation
    plots/              plots of the metrics
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from engine.errors import TrainError
from engine.store import RunHeader, RunStore
from engine.store.database import FILE as RUN_FILE
from engine.store.find import folders_with, is_file, named_so
from engine.store.lock import FILE as LOCK_FILE
from engine.store.private import private_file, private_folder

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

_HEADER = "train.json"
ROLLOUTS = "rollouts"
METRICS = "metrics.jsonl"
BATCHES = "batches.jsonl"


def begin(out: Path, header: RunHeader) -> Path:
    """Make the folder of a new training and write its header.

    Raises:
        TrainError: kind `train_setup`: the folder exists with a header, or cannot be written. A folder without header,
            which a kill leaves, is used.
    """
    folder = out / header.run_id
    try:
        # a launch that was killed while it made the folder has left nothing else there
        if not folder.is_dir() or {entry.name for entry in os.scandir(folder)} - {f".{_HEADER}"}:
            private_folder(folder)
    except OSError as error:
        raise TrainError(f"cannot make the training's folder {folder}: {error}", kind="train_setup") from error
    write_header(folder, header)
    return folder


def write_header(folder: Path, header: RunHeader) -> None:
    """Write the header of a training, also in place of another one after a resume changed values of its spec.

    Raises:
        TrainError: kind `train_setup`: it cannot be written.
    """
    draft = folder / f".{_HEADER}"
    try:
        private_file(draft).write_text(header.model_dump_json(indent=2) + "\n")
        draft.replace(folder / _HEADER)
    except OSError as error:
        raise TrainError(f"cannot write {folder / _HEADER}: {error}", kind="train_setup") from error


def discard(folder: Path) -> bool:
    """Remove a training's folder if it holds only the header. Returns whether it was removed."""
    entries = {entry.name for entry in os.scandir(folder)}
    if entries - {LOCK_FILE} != {_HEADER}:
        return False
    for name in entries:
        (folder / name).unlink()
    folder.rmdir()
    return True


def trainings(out: Path) -> list[Path]:
    """The folders of all trainings under `out`, sorted by name."""
    return folders_with(_HEADER, out)


def find_training(word: str, out: Path) -> Path:
    """Find a training by its folder, its id, the start of its id, or `latest`.

    Raises:
        TrainError: kind `train_setup`: no training matches, or several do.
    """
    path = Path(word)
    if is_file(path / _HEADER):
        return path
    all_trainings = trainings(out)
    if word == "latest" and all_trainings:
        return max(all_trainings, key=lambda folder: (folder / _HEADER).stat().st_mtime)
    meant = named_so(word, all_trainings)
    if len(meant) == 1:
        return meant[0]
    if meant:
        shown = ", ".join(folder.name for folder in meant[:5])
        raise TrainError(
            f"{len(meant)} trainings begin with `{word}`: {shown}; give more of the id", kind="train_setup"
        )
    raise TrainError(
        f"no training `{word}` in {out}; give its folder, its id, or `latest` (`engine train SPEC` starts one)",
        kind="train_setup",
    )


def named(name: str, out: Path) -> Path | None:
    """The training with exactly this name under `out`; None if there is none."""
    return out / name if (out / name / _HEADER).is_file() else None


def read_header(folder: Path) -> RunHeader:
    """Read the header of a training: its spec, overrides and package versions.

    Raises:
        TrainError: kind `train_setup`: it cannot be read.
    """
    try:
        return RunHeader.model_validate_json((folder / _HEADER).read_text())
    except (OSError, ValidationError) as error:
        raise TrainError(f"{folder / _HEADER} cannot be read: {error}", kind="train_setup") from error


def open_rollouts(folder: Path, loaded: LoadedSpec) -> RunStore:
    """Open the run store of a training's episodes for writing, and make it in the first launch.

    Raises:
        StoreError: another process trains in this folder, or the store is damaged or cannot be written.
    """
    if (folder / ROLLOUTS / RUN_FILE).exists():
        return RunStore.open(folder / ROLLOUTS)
    if (folder / ROLLOUTS).exists():  # a launch was killed while it made the store
        shutil.rmtree(folder / ROLLOUTS)
    return RunStore.create(folder, RunHeader.of(loaded, run_id=ROLLOUTS))
