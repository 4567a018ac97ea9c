"""A training in this process, and what it leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from engine.spec.load import LoadedSpec, load_spec
from engine.store import RunHeader
from engine.store import training as folders
from engine.train.checkpoint import checkpoints_of
from engine.train.trainer import Trainer


def begin_training(spec: Path | LoadedSpec, out: Path, *overrides: str, **options: Any) -> Trainer:
    """The trainer of a new training under `out`. `options`: what `Trainer` takes."""
    loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec, list(overrides))
    return Trainer(loaded, folders.begin(out, RunHeader.of(loaded, overrides=overrides)), **options)


def resume_training(training: Path) -> Trainer:
    """The trainer that goes on with the training in this folder."""
    return Trainer(folders.read_header(training).loaded_spec(), training)


def metric_lines(training: Path) -> list[dict[str, Any]]:
    """The lines of metrics in a training's folder; null stays None, so that lines can be compared."""
    return [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]


def policy_weights(training: Path) -> dict[str, Any]:
    """The policy's weights in the newest checkpoint of a training of one process, by name."""
    return load_file(checkpoints_of(training)[-1] / "policy/shard-00001-model-00001-of-00001.safetensors")
