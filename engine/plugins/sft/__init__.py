"""Supervised fine-tuning on written episodes: `train.kind: sft`.

kind.py      what holds for this kind of training
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="sft",
    about="Trains on written episodes",
    train_kinds={"sft": "engine.plugins.sft.kind:SFT"},
)
