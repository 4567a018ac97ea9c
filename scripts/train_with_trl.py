"""Trains a spec with TRL's GRPOTrainer in place of `engine train`, and prints one line for each step.

    python scripts/train_with_trl.py specs/train_arithmetic.yaml --out runs/with-trl --set train.precision=float32

Needs the extra `trl`. docs/trainers.md has the figures of this command.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from transformers import TrainerCallback
from trl import GRPOConfig

from engine.plugins.trainers.trl import EngineGRPOTrainer, EngineRollouts, grpo_arguments
from engine.spec.load import load_spec

SHOWN = (
    "reward/mean",
    "episode/solved",
    "loss",
    "sampler/diff_mean",
    "sampler/diff_max",
    "trl/empty_rows",
    "trl/left_out_tokens",
)


class Lines(TrainerCallback):
    """Prints the metrics of each step."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward/mean" in logs:
            values = "  ".join(f"{name} {float(logs[name]):.4g}" for name in SHOWN if name in logs)
            seconds = time.monotonic() - self._began
            sys.stdout.write(f"step {state.global_step}  {seconds:.0f} s  {values}\n")  # type: ignore[attr-defined]
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run store and of the model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change of the spec")
    parser.add_argument("--several-rows", choices=["refuse", "leave_out"], default="refuse")
    given = parser.parse_args()
    loaded = load_spec(given.spec, given.set)
    with EngineRollouts(loaded, given.out, several_rows=given.several_rows) as rollouts:
        arguments = grpo_arguments(rollouts.loaded) | {"disable_tqdm": True, "save_strategy": "no"}
        args = GRPOConfig(output_dir=str(given.out / "model"), **arguments)
        trainer = EngineGRPOTrainer(rollouts, args, callbacks=[Lines()])
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
