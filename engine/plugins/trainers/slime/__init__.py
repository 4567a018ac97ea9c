"""slime on episodes of a spec: the engine runs the episodes and gives the advantages, slime samples and updates the
weights.

    --rollout-function-path engine.plugins.trainers.slime.generate_rollout
    --custom-convert-samples-to-train-data-path engine.plugins.trainers.slime.convert
    --custom-advantage-function-path engine.plugins.trainers.slime.advantages
    --custom-config-path engine.yaml            # engine_spec: spec.yaml, engine_folder: runs/with-slime

`--custom-generate-function-path engine.plugins.trainers.slime.generate` is the other way in: slime's own rollout
function schedules, and each call runs one episode. Parts: `settings.py` refuses arguments, `rollouts.py` runs episodes
over slime's router, `rows.py` makes samples of rows and has the converter and the advantage function. slime is
imported only inside its functions.
"""

from __future__ import annotations

from engine.plugins.trainers.slime.rollouts import generate, generate_rollout
from engine.plugins.trainers.slime.rows import advantages, convert

__all__ = ["advantages", "convert", "generate", "generate_rollout"]
