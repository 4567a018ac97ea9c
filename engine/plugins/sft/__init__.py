"""Supervised fine-tuning on written episodes: `train.kind: sft`.

kind.py            what holds for this kind of training
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="sft",
    about="Trains on written episodes",
    sections=(Section(owner="train", keys=("data",), use="engine.plugins.sft.spec:SftDataSpec"),),
    train_kinds={"sft": "engine.plugins.sft.kind:SFT"},
    rules=("engine.plugins.sft.rules",),
)
