"""slime on episodes of a spec: the engine runs the episodes and gives the advantages, slime samples and updates the weights.

    --rollout-function-path engine.plugins.trainers.slime.generate_rollout
    --custom-convert-samples-to-train-data-path engine.plugins.trainers.slime.convert
    --custom-advantage-function-path engine.plugins.trainers.slime.advantages
    --custom-config-path engine.yaml            # engine_spec: spec.yaml, engine_folder: runs/with-slime

`--custom-generate-function-path engine.plugins.trainers.slime.generate` is the other way in: slime's own rollout function schedules, and each call
runs one episode. Parts: `settings.py` refuses arguments, `episodes.py` runs episodes over slime's router, `samples.py` makes samples of rows,
`hooks.py` has slime's functions, `handover.py` the converter and the advantage function. slime is imported only inside its functions.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "generate": "hooks",
    "generate_rollout": "hooks",
    "convert": "handover",
    "advantages": "handover",
}
__all__ = ["advantages", "convert", "generate", "generate_rollout"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
