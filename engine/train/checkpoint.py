"""Checkpoints: what a training needs to go on as if it had never stopped.

    checkpoints/step-000010/
        state.json              step, version, where the tasks stand, the best evaluation so far
        policy.safetensors      what is trained, in the trainer's own precision
        optimizer.safetensors   AdamW's moments, and torch's random state
        model/                  a whole model that `model.path` and `engine eval --model` can name; with LoRA:
        adapter/                the adapter, as `peft` reads it

Invariants:
- A checkpoint is under its name only when all of it is written.
- The newest `keep` stay, and the best one by evaluation.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.errors import TrainError
from engine.train.learner import RANDOM

if TYPE_CHECKING:
    from engine.train.learner import Learner

_STEP = "step-"


@dataclass(slots=True)
class State:
    """Where a training stands."""

    step: int
    """Batches that are trained on."""
    version: int
    """Of the weights: batches that changed them."""
    next_group: int
    """Groups that are not collected again."""
    best: float | None = None
    """The best evaluation so far."""
    best_step: int | None = None


def checkpoints_of(folder: Path) -> list[Path]:
    """Complete checkpoints of a training's folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob(f"{_STEP}*") if (path / "state.json").is_file())


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix(_STEP))


class Checkpoints:
    """Writes and reads the checkpoints of one training.

    Args:
        folder: The training's.
        keep: Newest ones that stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, state: State, learner: Learner) -> Path:
        """Write a checkpoint, and remove those that are no longer kept. One that is there already stays as it is.

        Raises:
            TrainError: kind `checkpoint`: it cannot be written.
        """
        final = self._folder / "checkpoints" / f"{_STEP}{state.step:06d}"
        try:
            if not (final / "state.json").is_file():
                draft = final.with_name(f".{final.name}.part")
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                with learner.process_group.full_parameters(learner.policy.model):
                    if learner.lora:
                        learner.policy.save_adapter(draft / "adapter")
                    else:
                        learner.policy.save(draft / "model")
                    save_file(_contiguous(learner.policy.state()), draft / "policy.safetensors")
                save_file(
                    _contiguous(learner.optimizer_state()) | {RANDOM: torch.get_rng_state()},
                    draft / "optimizer.safetensors",
                )
                (draft / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
                draft.replace(final)
            self._prune(state)
        except (OSError, SafetensorError) as error:
            raise TrainError(f"cannot write the checkpoint {final}: {error}", kind="checkpoint") from error
        return final

    def _prune(self, state: State) -> None:
        stay = checkpoints_of(self._folder)[-self._keep :]
        for path in checkpoints_of(self._folder):
            if path not in stay and step_of(path) != state.best_step:
                shutil.rmtree(path)

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None where there is none."""
        return max(checkpoints_of(self._folder), key=step_of, default=None)

    @staticmethod
    def read(checkpoint: Path, learner: Learner) -> State:
        """Bring a learner to where a checkpoint left it.

        Raises:
            TrainError: kind `checkpoint`: it cannot be read, or is of another model or other settings.
        """
        try:
            told: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
            with learner.process_group.full_parameters(learner.policy.model, write=True):
                learner.policy.load_state(load_file(checkpoint / "policy.safetensors"))
            torch.set_rng_state(learner.read_optimizer_state(checkpoint / "optimizer.safetensors"))
            return State(**told)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise TrainError(f"cannot go on from {checkpoint}: {error}", kind="checkpoint") from error


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them: on the CPU, in one piece, no two of one memory."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.data_ptr())
        whole[name] = plain
    return whole
