"""Checkpoints: all state that a resumed training needs to continue as if it had not stopped.

    checkpoints/step-000010/
        state.json              step, version, number of the next group, the best evaluation so far
        policy.safetensors      trained parameters, in the trainer's precision
        optimizer.safetensors   AdamW's moments, and torch's random state
        model/                  a full model for `model.path` and `engine eval --model`; with LoRA instead:
        adapter/                the adapter in peft's format

Invariants:
- A checkpoint gets its name only after all of its files are written.
- The newest `keep` checkpoints and the best one by evaluation are kept.
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
    """Progress of a training."""

    step: int
    """Number of finished steps."""
    version: int
    """Version of the weights: number of batches that changed them."""
    next_group: int
    """Number of the group at which a resumed training starts."""
    best: float | None = None
    """Value of the best evaluation so far."""
    best_step: int | None = None


def checkpoints_of(folder: Path) -> list[Path]:
    """The complete checkpoints in a training's folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob(f"{_STEP}*") if (path / "state.json").is_file())


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, read from its name."""
    return int(checkpoint.name.removeprefix(_STEP))


class Checkpoints:
    """Writes and reads the checkpoints of one training.

    Args:
        folder: The folder of the training.
        keep: Number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, state: State, learner: Learner) -> Path:
        """Write a checkpoint and remove old ones. A complete checkpoint of the same step is not written again.

        Returns:
            The folder of the checkpoint.

        Raises:
            TrainError: kind `checkpoint`: the checkpoint cannot be written.
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
        """The newest complete checkpoint; None if there is none."""
        return max(checkpoints_of(self._folder), key=step_of, default=None)

    @staticmethod
    def read(checkpoint: Path, learner: Learner) -> State:
        """Load a checkpoint into a learner. Returns the progress of its training.

        Raises:
            TrainError: kind `checkpoint`: it cannot be read, or belongs to another model or other settings.
        """
        try:
            told: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
            with learner.process_group.full_parameters(learner.policy.model, write=True):
                learner.policy.load_state(load_file(checkpoint / "policy.safetensors"))
            torch.set_rng_state(learner.read_optimizer_state(checkpoint / "optimizer.safetensors"))
            return State(**told)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise TrainError(f"cannot resume from {checkpoint}: {error}", kind="checkpoint") from error


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the form that safetensors needs: on the CPU, contiguous, without shared memory."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.data_ptr())
        whole[name] = plain
    return whole
