"""A training at a step <-> its checkpoint: the complete state from which it is resumed.

    checkpoints/step-000010/
        state.json              format, step, version, consumed groups, the best evaluation so far, names and versions
                                of parts
        policy/                 part: trained parameters, those of 16 bits in float32; a file for each process
                                (`files.py`)
        optimizer/              part: AdamW's moments, and torch's random state
        model/                  a full model for `model.path` and `engine eval --model`; with LoRA instead:
        adapter/                the adapter in peft's format

Invariants:
- A checkpoint gets its name only after all of its files are on disk.
- Values that are not finite are never saved, so the newest checkpoint is always usable.
- The newest `keep` checkpoints and the best one by evaluation are kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from engine.errors import TrainError
from engine.runner.task_order import ConsumedGroups
from engine.store.private import sync_path

if TYPE_CHECKING:
    from engine.train.learner import Learner

_STEP = "step-"
FORMAT = 3
"""Format version of a checkpoint."""


@dataclass(slots=True)
class State:
    """Progress of a training."""

    step: int = 0
    """Number of finished steps."""
    version: int = 0
    """Version of the weights: number of batches that changed them."""
    groups: ConsumedGroups = field(default_factory=ConsumedGroups)
    """Groups that are never trained on again."""
    best: float | None = None
    """Value of the best evaluation so far."""
    best_step: int | None = None


def checkpoints_of(folder: Path) -> list[Path]:
    """The complete checkpoints in a training's folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob(f"{_STEP}*") if (path / "state.json").is_file())


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, read from its name."""
    return int(checkpoint.name.removeprefix(_STEP))


def write_checkpoint(folder: Path, keep: int, state: State, learner: Learner) -> Path:
    """Write a checkpoint and remove old ones. If a complete checkpoint of the same step exists, only its
    `state.json` is written.

    Args:
        folder: The folder of the training.
        keep: Number of newest checkpoints to keep.
        state: The progress of the training.
        learner: What is written.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainError: kind `checkpoint`: the checkpoint cannot be written; `diverged`: a value is not finite.
    """
    final = folder / "checkpoints" / f"{_STEP}{state.step:06d}"
    parts = learner.state_parts()
    versions = {name: part.version for name, part in parts.items()}
    content = {"format": FORMAT} | msgspec.to_builtins(state, order="deterministic") | {"parts": versions}
    text = json.dumps(content, indent=2) + "\n"
    draft = final.with_name(f".{final.name}.part")
    try:
        if (final / "state.json").is_file():
            (final / ".state.json").write_text(text, encoding="utf-8")
            sync_path(final / ".state.json")
            (final / ".state.json").replace(final / "state.json")
        else:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            learner.save_state(draft)
            if learner.policy.trains_adapter:
                learner.policy.save_adapter(draft / "adapter")
            else:
                learner.policy.save(draft / "model")
            (draft / "state.json").write_text(text, encoding="utf-8")
            for path in [draft, *draft.rglob("*")]:
                sync_path(path)
            draft.replace(final)
            sync_path(final.parent)
        stay = checkpoints_of(folder)[-keep:]
        for path in checkpoints_of(folder):
            if path not in stay and step_of(path) != state.best_step:
                # renamed first, so that a partly removed checkpoint never has a valid name
                path.replace(path.with_name(f".{path.name}.old"))
        for old in final.parent.glob(f".{_STEP}*.old"):
            shutil.rmtree(old)
    except TrainError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        raise TrainError(f"cannot write the checkpoint {final}: {error}", kind="checkpoint") from error
    return final


def read_checkpoint(checkpoint: Path, learner: Learner) -> State:
    """Load a checkpoint into a learner. Returns the progress of its training.

    Raises:
        TrainError: kind `checkpoint`: it cannot be read, or belongs to another model or other settings.
    """
    try:
        data: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}; this engine reads format {FORMAT}")
        state = msgspec.convert(data, State)
        parts, held = learner.state_parts(), data["parts"]
        for name in sorted(held.keys() | parts.keys()):
            version = parts[name].version if name in parts else None
            if version != held.get(name):
                raise ValueError(
                    f"its part `{name}` has version {held.get(name, '(missing)')}, and this training needs "
                    f"{'no such part' if version is None else f'version {version}'}"
                )
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise TrainError(f"cannot resume from {checkpoint}: {error}", kind="checkpoint") from error
    learner.load_state(checkpoint)
    return state
